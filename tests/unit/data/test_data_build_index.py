"""`prepare-data --build-index`: what a run would build first, built before it."""

from __future__ import annotations

import argparse

import pytest

from moe_train.config import ConfigError
from moe_train.data import build_data, epoch
from moe_train.recipes import prepare_data


def build_index(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    return prepare_data.run(parser.parse_args([*arguments]))


def test_epochs_are_ready_before_the_run(make_pair, indexed_config, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(epoch, "CACHED_ABOVE", 0)
    prefix = make_pair("a", [9] * 40)
    config = indexed_config([prefix], split="90,10,0")
    overrides = ["data=indexed", f"data.paths=[{prefix}]", f"data.cache_dir={tmp_path / 'cache'}", "data.seq_len=8", "data.split='90,10,0'"]
    assert build_index("--build-index", *overrides, "--epochs", "2") == 0
    shown = capsys.readouterr().out
    assert "train: 44 rows of 8 tokens, 2 epoch(s) ready" in shown
    assert "valid: 4 rows of 8 tokens, 1 epoch(s) ready" in shown
    assert "test" not in shown
    monkeypatch.setattr(epoch, "build_epoch", lambda *_: pytest.fail("built again"))
    stream = build_data(config, "train")
    assert stream.batch(0, 88).tokens_BT.shape == (88, 8)
    assert stream.fingerprint[:12] in shown
    build_data(config, "valid").batch(0, 4)


def test_bad_epochs_and_bad_override(make_pair) -> None:
    with pytest.raises(ConfigError, match=r"--epochs 0"):
        build_index("--build-index", "data=indexed", "--epochs", "0")
    with pytest.raises(ConfigError, match=r"data\.paths"):
        build_index("--build-index", "data=indexed")
