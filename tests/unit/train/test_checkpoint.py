"""A checkpoint exists only when it is whole, and nothing in it can run code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from moe_train.config import ConfigError
from moe_train.train import checkpoint
from moe_train.train.checkpoint import Snapshot, newest_whole, point_to, pointed, problems, remove_halves, require_whole, retain, save
from moe_train.train.tensors import DTYPES, file_sum, read_tensors, write_tensors


def snapshot(step: int, tensors: dict[str, Tensor] | None = None) -> Snapshot:
    return Snapshot(step, {"model": tensors or {"w": torch.full((4, 3), float(step))}}, {"step": step}, {"config.yaml": b"seed: 1\n"})


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_type_come_back_bit_equal(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": (torch.randn(5, 7) * 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3).to(dtype),
        "view": (torch.randn(6, 8) * 3).to(dtype).T[::2],
    }
    total = write_tensors(tmp_path / "x.safetensors", tensors)
    assert total == file_sum(tmp_path / "x.safetensors")
    loaded = read_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.get_slice("matrix").get_shape() == [5, 7]


def test_save_is_whole_and_pointed_to(tmp_path: Path) -> None:
    folder = save(tmp_path, snapshot(7), keep=2)
    assert folder.name == "step_00000007"
    assert problems(folder) == ""
    assert pointed(tmp_path) == folder.name
    assert newest_whole(tmp_path) == folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"].keys() == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert not list(tmp_path.glob(".tmp-*"))


def test_retention_keeps_the_last_written(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, snapshot(step), keep=2)
    assert steps(tmp_path) == [20, 30]
    save(tmp_path, snapshot(15), keep=2)  # the run was rolled back: a lower step, but written last
    assert steps(tmp_path) == [15, 30]
    save(tmp_path, snapshot(16), keep=0)
    assert steps(tmp_path) == [16]


def test_retention_never_counts_a_damaged_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, snapshot(step), keep=9)
    for step in (2, 3):
        (tmp_path / f"step_{step:08d}" / "model.safetensors").write_bytes(b"short")
    retain(tmp_path, 1)
    assert newest_whole(tmp_path) == tmp_path / "step_00000001"


def damage_truncate(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(40)


def damage_flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_missing(folder: Path) -> None:
    (folder / "state.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def damage_half_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:30])


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_missing, damage_manifest, damage_half_manifest])
def test_falls_back_to_the_newest_whole_one_and_says_so(tmp_path: Path, damage, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, snapshot(1), keep=3)
    save(tmp_path, snapshot(2), keep=3)
    damage(save(tmp_path, snapshot(3), keep=3))
    assert newest_whole(tmp_path) == tmp_path / "step_00000002"
    said = capsys.readouterr().err
    assert "step_00000003 is not whole" in said
    assert "falling back to" in said
    with pytest.raises(ConfigError, match="step_00000003 is not a whole checkpoint"):
        require_whole(tmp_path / "step_00000003")


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    damage_flip(save(tmp_path, snapshot(1), keep=3))
    with pytest.raises(ConfigError, match=r"none of the 1 checkpoints .* is whole"):
        newest_whole(tmp_path)
    assert newest_whole(tmp_path / "nothing") is None


def test_pointer_rules_and_survives_its_loss(tmp_path: Path) -> None:
    save(tmp_path, snapshot(1), keep=3)
    save(tmp_path, snapshot(2), keep=3)
    point_to(tmp_path / "step_00000001")
    assert newest_whole(tmp_path) == tmp_path / "step_00000001"
    for junk in (b"", b"../../etc\n", b"\xff\xfe", b"step_99999999\n"):
        (tmp_path / "latest").write_bytes(junk)
        assert newest_whole(tmp_path) == tmp_path / "step_00000002"
    (tmp_path / "latest").unlink()
    assert newest_whole(tmp_path) == tmp_path / "step_00000002"


def every_system_call(monkeypatch: pytest.MonkeyPatch, fail_at: int) -> list[str]:
    """Let the `fail_at`-th call that touches the disk in a save raise; records the calls made."""
    calls: list[str] = []

    def wrap(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            if len(calls) == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in [
        (os, "fsync"),
        (Path, "mkdir"),
        (Path, "rename"),
        (Path, "replace"),
        (checkpoint, "write_tensors"),
        (checkpoint, "write_bytes"),
        (checkpoint, "file_sum"),
    ]:
        wrap(owner, name)
    return calls


def test_a_failure_at_any_point_leaves_the_older_checkpoint_whole(tmp_path: Path) -> None:
    save(tmp_path / "count", snapshot(1), keep=1)
    with pytest.MonkeyPatch.context() as patch:
        calls = every_system_call(patch, fail_at=0)
        save(tmp_path / "count", snapshot(2), keep=1)
    total = len(calls)
    assert total > 15
    for fail_at in range(1, total + 1):
        root = tmp_path / str(fail_at)
        save(root, snapshot(1), keep=1)
        with pytest.MonkeyPatch.context() as patch:
            every_system_call(patch, fail_at)
            with pytest.raises(OSError, match="No space left"):
                save(root, snapshot(2), keep=1)
        found = newest_whole(root)
        assert found is not None
        step = int(found.name.removeprefix("step_"))
        assert torch.equal(read_tensors(found / "model.safetensors")["w"], torch.full((4, 3), float(step)))
        remove_halves(root)
        assert not list(root.glob(".tmp-*"))
        save(root, snapshot(3), keep=1)
        assert newest_whole(root) == root / "step_00000003"


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {Bomb.path}",)


@pytest.mark.parametrize("where", ["beside", "instead", "forged"])
def test_a_pickle_never_runs(tmp_path: Path, where: str) -> None:
    Bomb.path = tmp_path / "ran"  # type: ignore[attr-defined]
    payload = pickle.dumps(Bomb())
    folder = save(tmp_path / "checkpoints", snapshot(1), keep=1)
    model = folder / "model.safetensors"
    if where == "beside":
        (folder / "model.pt").write_bytes(payload)
        assert torch.equal(read_tensors(require_whole(folder) / "model.safetensors")["w"], torch.ones(4, 3))
    else:
        model.write_bytes(payload)
        if where == "forged":
            manifest = json.loads((folder / "manifest.json").read_text())
            manifest["files"]["model.safetensors"] = {"size": len(payload), "sha256": file_sum(model).sha256}
            (folder / "manifest.json").write_text(json.dumps(manifest))
            assert problems(folder) == ""
        else:
            assert "model.safetensors has" in problems(folder)
        with pytest.raises(ValueError, match="not a safetensors file"):
            read_tensors(model)
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_pickles_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80\x04N.")
    with pytest.raises(ConfigError, match=r"no manifest\.json \(old\.pt can hold a pickle and is never loaded\)"):
        require_whole(tmp_path)
    with pytest.raises(ConfigError, match="is not a checkpoint folder"):
        require_whole(tmp_path / "old.pt")


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", snapshot(1), keep=1)
    (tmp_path / "secret").write_bytes(b"x")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"size": 1, "sha256": file_sum(tmp_path / "secret").sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert problems(folder) == "../../secret is missing"


def test_header_is_aligned(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": torch.ones(3)})
    (length,) = struct.unpack("<Q", (tmp_path / "x").read_bytes()[:8])
    assert (8 + length) % 8 == 0
