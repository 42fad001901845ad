"""A participant: a process that holds one built model and runs steps when told (bench/peers/serve.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from bench.environment import ROOT, peer_python
from moe_train.cli.openmp import SPIN_COUNT


class ParticipantError(RuntimeError):
    """The participant's process ended before it answered."""


@dataclass(frozen=True)
class Participant:
    """module: file in bench/peers; dropless: whether every token reaches its experts (others are shown but not counted); environment:
    instead of the way to wait that all others share."""

    name: str
    module: str
    variant: str = ""
    compiled: bool = False
    dropless: bool = True
    environment: tuple[tuple[str, str], ...] = (("GOMP_SPINCOUNT", SPIN_COUNT),)

    @property
    def python(self) -> str:
        return sys.executable if self.module == "ours" else peer_python()


class Session:
    """Use as a context: the process ends with it."""

    def __init__(self, participant: Participant, shape: str, precision: str) -> None:
        self.participant = participant
        command = [participant.python, "-m", f"bench.peers.{participant.module}", "--shape", shape, "--precision", precision]
        command += ["--variant", participant.variant] if participant.variant else []
        command += ["--compile"] if participant.compiled else []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        # As `moe-train` sets it, for everyone: a participant who waits takes nothing from the one who runs.
        for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            environment.pop(key, None)
        environment |= dict(participant.environment)
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.facts = self._answer()
        self.facts["start_seconds"] = time.perf_counter() - begin

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def steps(self, count: int) -> list[float]:
        """Seconds of each of `count` training steps."""
        return [float(seconds) for seconds in self._ask(f"step {count}")["seconds"]]

    def end(self) -> int:
        """Largest resident memory of the steps, in bytes; the process ends."""
        peak = int(self._ask("end")["peak_bytes"])
        self._process.wait(timeout=60)
        return peak

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ParticipantError(self._reason()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise ParticipantError(self._reason())

    def _reason(self) -> str:
        """The last line the process wrote to stderr, or how it ended."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return (lines[-1] if lines else f"ended with code {code}")[:200]
