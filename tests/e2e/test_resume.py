"""Kill, stop, starve and damage a run of the command line: what it wrote is whole, and it continues to the last digit.

The judge of every case is one run of the same command that nothing happened to.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STEPS = 12
EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "mtp_loss", "max_vio")
KILLS = 5


def command(run_dir: Path, *overrides: str) -> list[str]:
    settings = (f"run.dir={run_dir}", f"train.steps={STEPS}", "train.checkpoint_every=2", "log.console=false", "log.loggers=[]")
    return [sys.executable, "-m", "moe_train", "pretrain", "+experiment=smoke", *settings, *overrides]


def run(run_dir: Path, *overrides: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(run_dir, *overrides), capture_output=True, text=True, timeout=240, preexec_fn=before)


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(run_dir, *overrides), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def metrics(run_dir: Path) -> list[dict[str, object]]:
    """Every line must be whole JSON; each step once, in order."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: line[key] for key in EXACT} for line in lines]


def weights(run_dir: Path) -> dict[str, str]:
    folder = run_dir / "checkpoints" / f"step_{STEPS:08d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    return {name: files[name]["sha256"] for name in ("model.safetensors", "optimizer.safetensors")}


def wait_for_lines(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(path)] == list(range(1, STEPS + 1))
    return path


def assert_as_if_nothing_happened(run_dir: Path, reference: Path) -> None:
    assert metrics(run_dir) == metrics(reference)
    assert weights(run_dir) == weights(reference)


def test_kill_9_at_random_moments(tmp_path: Path, reference: Path) -> None:
    dice, run_dir, killed = random.Random(8), tmp_path / "run", 0
    path = run_dir / "metrics.jsonl"
    for _ in range(KILLS):
        done = path.read_bytes().count(b"\n") if path.exists() else 0
        process = start(run_dir)
        wait_for_lines(process, run_dir, min(done + 1, STEPS - 1))
        time.sleep(dice.uniform(0.0, 0.15))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        # A kill can tear the last line at any byte: make that happen rather than wait for it.
        with open(path, "ab") as file:
            file.write(b'{"step": 99, "loss": 6.1'[: dice.randrange(24)])
    assert killed >= 3
    assert run(run_dir).returncode == 0
    assert_as_if_nothing_happened(run_dir, reference)


def test_sigterm_saves_and_exits_cleanly(tmp_path: Path, reference: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, "train.checkpoint_every=0")
    wait_for_lines(process, run_dir, 3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "SIGTERM: saved step" in said
    done = len(metrics(run_dir))
    assert 3 <= done < STEPS
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{done:08d}"
    assert run(run_dir).returncode == 0
    assert_as_if_nothing_happened(run_dir, reference)


def test_disk_full_leaves_the_older_checkpoint(tmp_path: Path, reference: Path) -> None:
    run_dir = tmp_path / "run"
    done = run(run_dir, "train.steps=4", "optim.schedule.decay_steps=12")
    assert done.returncode == 0, done.stderr
    small = 60_000  # bytes a file may have: metrics fit, weights do not

    full = run(run_dir, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small)))
    assert full.returncode == 1, full.stderr
    assert "Traceback" not in full.stderr
    assert "the checkpoint of step 12 could not be written" in full.stderr
    assert "the checkpoint step_00000004 is untouched" in full.stderr
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_00000002", "step_00000004", "latest"}
    assert run(run_dir).returncode == 0
    assert_as_if_nothing_happened(run_dir, reference)


def test_a_damaged_newest_checkpoint_falls_back(tmp_path: Path, reference: Path) -> None:
    run_dir = tmp_path / "run"
    assert run(run_dir, "train.steps=6", "optim.schedule.decay_steps=12").returncode == 0
    newest = run_dir / "checkpoints" / "step_00000006" / "optimizer.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0x10
    newest.write_bytes(data)
    done = run(run_dir)
    assert done.returncode == 0, done.stderr
    assert "step_00000006 is not whole: optimizer.safetensors does not have the SHA-256" in done.stderr
    assert "falling back to" in done.stderr
    assert "step_00000004" in done.stderr
    assert_as_if_nothing_happened(run_dir, reference)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.moe.expert_hidden_size=48", "tensors differ"),
        ("seed=7", "seed was"),
        ("train.global_batch=8", "train.global_batch was 16, now 8"),
        ("run.resume=never", "already holds a run"),
    ],
)
def test_what_cannot_continue_is_refused_and_nothing_is_lost(reference: Path, override: str, message: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(reference.rglob("*")) if path.name != ".lock"}
    done = run(reference, override, "train.steps=20")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    after = {path: path.stat().st_mtime_ns for path in sorted(reference.rglob("*")) if path.name != ".lock"}
    assert {p for p in before if p.is_file()} == {p for p in after if p.is_file()}
    assert [p.name for p in before if p.is_file() and before[p] != after[p]] == []


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    began = time.monotonic()
    done = run(tmp_path / "file" / "run")
    assert (done.returncode, "is not writable" in done.stderr) == (2, True)
    assert time.monotonic() - began < 30
    assert os.listdir(tmp_path) == ["file"]
