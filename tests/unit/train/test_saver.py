"""Asynchronous checkpoints: of the step they are labelled with, one in flight, a full disk reported and survived."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from moe_train.config import RunError
from moe_train.train import saver as saver_module
from moe_train.train.checkpoint import Snapshot, newest_whole, save
from moe_train.train.saver import Saver
from moe_train.train.tensors import read_tensors


def snapshot(step: int, tensor: torch.Tensor) -> Snapshot:
    return Snapshot(step, {"model": {"bias": tensor}}, {"step": step}, {})


def make(root: Path, asynchronous: bool = True, keep: int = 2) -> tuple[Saver, list[Path]]:
    durable: list[Path] = []
    return Saver(root, keep, asynchronous, durable.append), durable


class Gate:
    """Holds `save` back until it is opened, as a slow disk would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.running, self.most = threading.Event(), 0, 0
        monkeypatch.setattr(saver_module, "save", self)

    def __call__(self, root: Path, snapshot: Snapshot, keep: int) -> Path:
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.opened.wait(30)
        path = save(root, snapshot, keep)
        self.running -= 1
        return path


def test_the_snapshot_is_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public bug: the bias buffer in an asynchronous checkpoint was that of a later step."""
    gate, live = Gate(monkeypatch), torch.full((3,), 1.0)
    saver, durable = make(tmp_path)
    saver.save(snapshot(1, live))
    live.fill_(2.0)
    saver.poll()
    assert durable == []
    assert newest_whole(tmp_path) is None, "nothing is announced or pointed to before it is durable"
    gate.opened.set()
    saver.wait()
    assert durable == [tmp_path / "step_00000001"]
    assert torch.equal(read_tensors(durable[0] / "model.safetensors")["bias"], torch.full((3,), 1.0))


def test_at_most_one_in_flight_and_the_newest_durable_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public bug: with keep-last 1 the durable step 10 was removed while 20 and 30 were in flight."""
    gate, live = Gate(monkeypatch), torch.zeros(3)
    save(tmp_path, snapshot(10, live), keep=1)
    saver, durable = make(tmp_path, keep=1)
    saver.save(snapshot(20, live))
    assert newest_whole(tmp_path) == tmp_path / "step_00000010"
    later = threading.Timer(0.05, gate.opened.set)
    later.start()
    saver.save(snapshot(30, live))
    saver.wait()
    assert gate.most == 1
    assert [path.name for path in durable] == ["step_00000020", "step_00000030"]
    assert newest_whole(tmp_path) == tmp_path / "step_00000030"


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(root: Path, snapshot: Snapshot, keep: int) -> Path:
        raise error

    monkeypatch.setattr(saver_module, "save", refuse)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk_in_the_middle_is_a_warning_at_the_end_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    saver, durable = make(tmp_path, asynchronous)
    saver.save(snapshot(1, torch.zeros(3)))
    saver.wait()
    fail(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    saver.save(snapshot(2, torch.zeros(3)))
    saver.wait()
    said = capsys.readouterr().err
    assert "warning: the checkpoint of step 2 could not be written" in said
    assert "No space left on device" in said
    assert "the checkpoint step_00000001 is untouched" in said
    with pytest.raises(RunError, match=r"step 3 could not be written .* No space left .*step_00000001 is untouched.*same command again"):
        saver.save_last(snapshot(3, torch.zeros(3)))
    assert durable == [tmp_path / "step_00000001"]
    assert newest_whole(tmp_path) == durable[0]


def test_other_errors_of_the_thread_reach_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = make(tmp_path)
    fail(monkeypatch, RunError("does not read back"))
    saver.save(snapshot(1, torch.zeros(3)))
    with pytest.raises(RunError, match="does not read back"):
        saver.wait()


def test_last_save_does_not_write_a_step_twice(tmp_path: Path) -> None:
    saver, durable = make(tmp_path)
    saver.save(snapshot(4, torch.zeros(3)))
    saver.save_last(snapshot(4, torch.ones(3)))
    assert durable == [tmp_path / "step_00000004"]
