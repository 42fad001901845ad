"""Who may write to run.dir, what run.resume finds, and which changes a resumed run refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_train.config import Config, ConfigError, MoEConfig, RunConfig
from moe_train.train.checkpoint import Snapshot, newest_whole, save
from moe_train.train.run_dir import RunDir, check_resumable, config_yaml, read_config


def config(path: Path, resume: str = "auto") -> Config:
    return Config(run=RunConfig(dir=str(path), resume=resume))


def checkpoint(root: Path, step: int) -> Path:
    return save(root / "checkpoints", Snapshot(step, {"model": {"w": torch.zeros(1)}}, {"step": step}, {}), keep=9)


def test_config_survives_yaml(tmp_path: Path) -> None:
    before = config(tmp_path)
    before.optim.eps, before.model.moe, before.model.ffn_pattern = 1e-8, MoEConfig(4, 2, 16), ["dense", "moe"]
    before.data.weights, before.data.paths = [0.5, 1.0], ["a", "ü"]
    (tmp_path / "config.yaml").write_bytes(config_yaml(before))
    assert read_config(tmp_path / "config.yaml") == before
    assert isinstance(read_config(tmp_path / "config.yaml").optim.eps, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmodell: {}\n", "does not know: modell"),
        ("model: {moe: {top_kk: 2}}\n", "model: moe has keys .* top_kk"),
        ("[1]", "not a mapping"),
        ("a: [", "cannot read"),
        ("!!python/object/apply:os.system ['true']\n", "cannot read"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "config.yaml")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*file/run is not writable: Not a directory. Set run\.dir"):
        RunDir(config(tmp_path / "file" / "run"))
    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match="is not writable"):
            RunDir(config(Path("/proc/run")))
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="Permission denied"):
            RunDir(config(tmp_path / "locked"))


def test_one_process_owns_the_folder_until_it_dies(tmp_path: Path) -> None:
    script = "from moe_train.config import Config, RunConfig\nfrom moe_train.train.run_dir import RunDir\n"
    script += f"r = RunDir(Config(run=RunConfig(dir={str(tmp_path)!r})))\n"
    other = subprocess.Popen(
        [sys.executable, "-c", script + "print('mine', flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"mine\n"
    with pytest.raises(ConfigError, match=f"in use by process {other.pid}"):
        RunDir(config(tmp_path))
    other.kill()
    other.wait()
    RunDir(config(tmp_path)).close()


def test_never_refuses_a_folder_with_a_run(tmp_path: Path) -> None:
    run_dir = RunDir(config(tmp_path / "new"))
    assert run_dir.find_checkpoint("never") is None
    (run_dir.path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"run\.resume=never, but run\.dir=.* already holds a run.*run\.resume=auto"):
        run_dir.find_checkpoint("never")
    run_dir.close()


def test_auto_removes_halves_and_finds_the_newest(tmp_path: Path) -> None:
    run_dir = RunDir(config(tmp_path))
    assert run_dir.find_checkpoint("auto") is None
    checkpoint(tmp_path, 1)
    newest = checkpoint(tmp_path, 2)
    (run_dir.checkpoints / ".tmp-step_00000003").mkdir()
    assert run_dir.find_checkpoint("auto") == newest
    assert not (run_dir.checkpoints / ".tmp-step_00000003").exists()
    run_dir.close()


def test_a_path_rolls_back_or_starts_from_another_run(tmp_path: Path) -> None:
    run_dir = RunDir(config(tmp_path / "run"))
    first = checkpoint(run_dir.path, 1)
    checkpoint(run_dir.path, 2)
    assert run_dir.find_checkpoint(str(first)) == first
    assert newest_whole(run_dir.checkpoints) == first, "a later run.resume=auto follows the rolled-back branch"
    run_dir.close()
    foreign, fresh = checkpoint(tmp_path / "other", 5), RunDir(config(tmp_path / "fresh"))
    assert fresh.find_checkpoint(str(foreign)) == foreign
    own = checkpoint(fresh.path, 6)
    assert fresh.find_checkpoint(str(foreign)) == own, "the same command again, as a scheduler requeues it, goes on from its own checkpoint"
    with pytest.raises(ConfigError, match="is not a checkpoint folder"):
        fresh.find_checkpoint(str(tmp_path / "missing"))
    fresh.close()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 7, "seed was 1234, now 7"),
        ("train.global_batch", 32, r"train\.global_batch was 16, now 32"),
        ("train.batch_ramp.start", 4, r"train\.batch_ramp\.start was None, now 4"),
        ("train.precision", "bf16", r"train\.precision was fp32, now bf16"),
        ("data.seq_len", 128, r"data\.seq_len was 512, now 128"),
        ("optim.name", "muon", r"optim\.name was adamw, now muon"),
    ],
)
def test_changes_that_break_exactness_are_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    new = config(tmp_path)
    put(new, key, value)
    with pytest.raises(ConfigError, match=f"{message}.*Restore the old value, or start a new run"):
        check_resumable(config(tmp_path), new, tmp_path)


def put(target: object, key: str, value: object) -> None:
    *path, last = key.split(".")
    for name in path:
        target = getattr(target, name)
    setattr(target, last, value)


def test_changes_that_alter_training_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = config(tmp_path)
    for key, value in [("train.micro_batch", 1), ("train.recompute", "full"), ("run.name", "x"), ("log.every", 5)]:
        put(new, key, value)
    check_resumable(config(tmp_path), new, tmp_path)
    assert capsys.readouterr().err == ""
    for key, value in [("optim.lr", 1e-5), ("model.moe.top_k", 3), ("train.grad_clip", 0.5), ("optim.schedule.min_lr_ratio", 0.2)]:
        put(new, key, value)
    check_resumable(config(tmp_path), new, tmp_path)
    said = capsys.readouterr().err
    assert "optim.lr was 0.0003" in said
    assert "model.moe.top_k was 0" in said
    assert "train.grad_clip was 1.0" in said
    assert "optim.schedule.min_lr_ratio was 0.1" in said


def test_more_steps_warn_only_when_the_decay_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = config(tmp_path), config(tmp_path)
    new.train.steps = old.train.steps * 2
    for each in (old, new):
        each.optim.schedule.name = "constant"
    check_resumable(old, new, tmp_path)
    assert capsys.readouterr().err == ""
    for each in (old, new):
        each.optim.schedule.name = "cosine"
    check_resumable(old, new, tmp_path)
    assert "decays over steps 0 … 200 from here on; the run so far followed 0 … 100" in capsys.readouterr().err
