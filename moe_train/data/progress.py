"""A progress bar on stderr; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """`with Progress('tokenizing', total, 'files') as bar: bar.advance(n)`. unit 'bytes' is shown in kB, MB, GB."""

    def __init__(self, title: str, total: float, unit: str):
        self.title, self.total, self.unit = title, total, unit
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            amount = (DownloadColumn(),) if self.unit == "bytes" else (MofNCompleteColumn(), TextColumn(self.unit))
            columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self.title, total=self.total)
            self._bar.start()
        return self

    def advance(self, amount: float) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, amount)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
