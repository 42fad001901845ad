"""When checkpoints are written, and what happens when the disk refuses one.

Asynchronous: the tensors are copied to CPU memory at the step the checkpoint is labelled with, and a thread writes them; at most one is
in flight, a second one waits for it. A save that fails in the middle of a run is reported and training goes on (the older checkpoint is
untouched); the last save of a run must succeed, or the run has failed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from moe_train.config import RunError
from moe_train.train.checkpoint import Snapshot, pointed, save


class Saver:
    """root: run.dir/checkpoints. `on_durable(path)` is called from the training thread once a checkpoint is whole on the disk."""

    def __init__(self, root: Path, keep: int, asynchronous: bool, on_durable: Callable[[Path], None]) -> None:
        self.root, self.keep, self.asynchronous, self.on_durable = root, keep, asynchronous, on_durable
        self.saved_step: int | None = None
        """Step of the newest checkpoint that is durable."""
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._flying: tuple[Snapshot, Future[Path]] | None = None

    def save(self, snapshot: Snapshot) -> None:
        """A checkpoint in the middle of the run."""
        self.wait()
        if self.asynchronous:
            snapshot.copy_tensors()
        self._flying = snapshot, self._threads.submit(save, self.root, snapshot, self.keep)
        if not self.asynchronous:
            self.wait()

    def save_last(self, snapshot: Snapshot) -> None:
        """The checkpoint at the end: written before this returns; RunError when it cannot be."""
        self.wait()
        if self.saved_step != snapshot.step:
            self._flying = snapshot, self._threads.submit(save, self.root, snapshot, self.keep)
            self.wait(last=True)

    def poll(self) -> None:
        """Report a save that has ended since; never waits."""
        if self._flying is not None and self._flying[1].done():
            self.wait()

    def close(self) -> None:
        """Let a write that is under way end (a run that failed still keeps its last checkpoint), then free the thread."""
        self._threads.shutdown(wait=True)

    def wait(self, last: bool = False) -> None:
        """Until nothing is in flight. A refusal by the disk is a warning, or a RunError for the last save."""
        if self._flying is None:
            return
        (snapshot, future), self._flying = self._flying, None
        try:
            path = future.result()
        except OSError as error:
            message = self._explain(snapshot, error)
            if last:
                raise RunError(message) from error
            print(f"warning: {message} Training goes on.", file=sys.stderr, flush=True)
            return
        self.saved_step = snapshot.step
        self.on_durable(path)

    def _explain(self, snapshot: Snapshot, error: OSError) -> str:
        try:
            free = f"{shutil.disk_usage(self.root).free / 1e6:,.1f} MB"
        except OSError:
            free = "an unknown number of bytes"
        older = pointed(self.root)
        kept = f"the checkpoint {older} is untouched" if older else "there is no older checkpoint"
        return (
            f"the checkpoint of step {snapshot.step} could not be written to {self.root}: {error.strerror or error}. It needs about "
            f"{snapshot.num_bytes / 1e6:,.1f} MB and {free} are free; {kept}. "
            "Free some space (or lower train.keep_checkpoints) and run the same command again."
        )
