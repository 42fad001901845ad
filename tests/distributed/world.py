"""A pool of gloo workers that a test session starts once and gives functions to run.

`World.run(function, size)` runs `function(*args)` on ranks 0 … size − 1 of a fresh process group and returns what each rank returned. A
fault in one rank fails the call at once with that rank's traceback: the other ranks, which may wait for it in a collective for ever, are
killed and started anew for the next call. A call that does not end in time fails with the stack of every rank.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_RANKS = 8


class RankFailure(AssertionError):
    """One rank of a world raised, died or hung; the message holds its traceback."""


def _serve(connection: Connection, rank: int) -> None:
    """The life of one worker: a job, its answer, the next job."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        job = connection.recv()
        if job is None:
            return
        function, args, size, store, stacks, seconds = job
        try:
            with open(stacks, "w") as file:
                faulthandler.dump_traceback_later(seconds, file=file)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
                )
                value = function(*args)
                # gloo aborts a rank whose peers leave while it still talks to them.
                dist.barrier()
                dist.destroy_process_group()
                faulthandler.cancel_dump_traceback_later()
            connection.send((True, value))
        except BaseException:  # noqa: BLE001  whatever it is, the test session must hear of it
            connection.send((False, traceback.format_exc()))
            return


class World:
    """Workers are forked from a server that has torch imported, so that eight of them start in the time of one."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed"])
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], size: int, *args: Any, seconds: float = 60.0) -> list[Any]:
        """What `function(*args)` returned on each rank. function: at the top level of a module. RankFailure names the rank."""
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"a world of {size} ranks; this pool runs 1 to {MAX_RANKS}.")
        self._start(size)
        with tempfile.TemporaryDirectory() as folder:
            stacks = [Path(folder) / f"stack_{rank}" for rank in range(size)]
            for rank, (_, connection) in enumerate(self._workers[:size]):
                connection.send((function, args, size, f"{folder}/store", str(stacks[rank]), seconds))
            try:
                return self._collect(size, seconds + 10, stacks)
            except BaseException:
                self.close()
                raise

    def _start(self, size: int) -> None:
        for rank in range(len(self._workers), size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, size: int, seconds: float, stacks: list[Path]) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:size])}
        values: list[Any] = [None] * size
        end = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                shown = "\n".join(f"rank {rank}:\n{stacks[rank].read_text()}" for rank in waiting.values())
                raise RankFailure(f"ranks {sorted(waiting.values())} of {size} did not end in {seconds:.0f} s.\n{shown}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, value = connection.recv()
                except EOFError:
                    raise RankFailure(f"rank {rank} of {size} died without a word.") from None
                if not good:
                    raise RankFailure(f"rank {rank} of {size} failed:\n{value}")
                values[rank] = value
        return values

    def close(self) -> None:
        """Kill every worker; the next `run` starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()


def pids(_: object = None) -> int:
    """A job for tests of the pool itself."""
    return os.getpid()
