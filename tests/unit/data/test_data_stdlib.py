"""The embedded corpus: deterministic, built once by many processes, sized by data.max_bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from moe_train.config import Config, ConfigError
from moe_train.data import build_data, store
from moe_train.data.stdlib import corpus_files

ROOT = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    config = Config()
    config.data.cache_dir = str(tmp_path_factory.mktemp("cache"))
    config.data.max_bytes, config.data.vocab_size, config.data.seq_len, config.data.split = 400_000, 512, 64, "90,10,0"
    config.model.vocab_size = 512
    return config


def test_the_whole_corpus_is_the_standard_library() -> None:
    files = dict(corpus_files(ROOT, None))
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(files)
    assert not any("site-packages" in name for name in files)
    assert sum(files.values()) > 9_000_000  # about 31 MB where the tests of Python are installed


def test_max_bytes_takes_a_spread_of_files_that_fits() -> None:
    whole, sample = corpus_files(ROOT, None), corpus_files(ROOT, 400_000)
    total = sum(size for _, size in sample)
    assert 390_000 < total <= 400_000
    assert [file for file in whole if file in set(sample)] == sample
    assert len({Path(name).parent for name, _ in sample}) > 5
    with pytest.raises(ConfigError, match=r"data.max_bytes=1 is smaller than every file"):
        corpus_files(ROOT, 1)


def test_from_nothing_to_batches_of_python_source(config) -> None:
    train, valid = build_data(config, "train"), build_data(config, "valid")
    assert train.tokenizer.get_vocab_size() == 512
    assert 1.5 < valid.bytes_per_token < 5
    assert train.num_sequences > 2 * valid.num_sequences > 10
    text = train.tokenizer.decode(train.batch(0, train.num_sequences // 2).tokens_BT.flatten().tolist())
    assert "def " in text
    assert "import" in text
    assert 350_000 < train.num_tokens * train.bytes_per_token + valid.num_tokens * valid.bytes_per_token <= 400_000


def test_another_folder_and_another_process_give_the_same_rows(config, tmp_path) -> None:
    first = build_data(config, "train")
    config.data.cache_dir, keep = str(tmp_path), config.data.cache_dir
    second = build_data(config, "train")
    config.data.cache_dir = keep
    assert second.fingerprint == first.fingerprint
    assert second.batch(5, 9).tokens_BT.tolist() == first.batch(5, 9).tokens_BT.tolist()


BUILDER = """
import sys
from pathlib import Path
from moe_train.config import DataConfig
from moe_train.data import stdlib
write = stdlib._write
def counted(*arguments):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    write(*arguments)
stdlib._write = counted
print(stdlib.prepare_stdlib(DataConfig(cache_dir=sys.argv[1], max_bytes=300_000, vocab_size=400)))
"""


def test_parallel_processes_build_once_and_say_nothing(tmp_path) -> None:
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "cache"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({out for out, _ in outputs}) == 1
    assert {err for _, err in outputs} == {""}
    assert (tmp_path / "log").read_text() == "built\n"
    assert [path.name.startswith("python_stdlib-") for path in (tmp_path / "cache").glob("[!.]*")] == [True]


def test_a_failed_build_leaves_no_folder_and_a_stale_half_is_removed(tmp_path) -> None:
    def fail(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    target = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        store.build_once(target, fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    half = tmp_path / ".data.half-killed"
    half.mkdir()
    os.utime(half, (0, 0))
    assert store.build_once(target, lambda folder: (folder / "whole").touch()) == target
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["data"]


def test_a_builder_that_comes_second_keeps_the_folder_of_the_first(tmp_path) -> None:
    """Where locks do not work the rename decides."""
    target = tmp_path / "data"

    def build(folder: Path) -> None:
        (folder / "mine").touch()
        target.mkdir()
        (target / "first").touch()

    store.build_once(target, build)
    assert [path.name for path in target.iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["data"]
