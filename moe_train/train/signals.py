"""Stop requests: SIGTERM (schedulers), SIGINT (Ctrl-C) and SIGUSR1 (SLURM's --signal) ask for a checkpoint at the next step boundary.

A second signal ends the process at once. Worker processes and threads are not affected: only the main thread of the training process
installs the handlers, and only while it trains.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """`with StopSignal() as stop:` … `if stop.requested:`; `stop.exit_code` is 130 after Ctrl-C (what shells expect, so that loops stop)
    and 0 after the others: the work is saved and a scheduler need not call it a failure."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        return 130 if self.received is signal.SIGINT else 0

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        # Not print: the signal may have interrupted one, and Python's buffered files refuse to be entered twice.
        os.write(2, f"\n{self.received.name}: saving a checkpoint after this step; once more ends at once.\n".encode())
