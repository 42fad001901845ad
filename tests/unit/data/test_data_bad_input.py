"""Each mistake is one ConfigError that names the file, the numbers and the way out; nothing is written."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from moe_train.config import Config, ConfigError
from moe_train.data import build_data, check_vocab
from moe_train.data.indexed import HEADER, check_pair
from moe_train.data.sources import open_bytes
from moe_train.data.split import parse_split
from moe_train.data.tokenizer import end_token, load_tokenizer, new_bpe, train_bpe
from moe_train.data.writer import part
from moe_train.recipes import prepare_data


@pytest.fixture
def refused(tmp_path, tokenizer) -> Callable[..., None]:
    """refused(message, input, *flags): prepare-data raises ConfigError that matches `message`, and nothing appears at the output."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def check(message: str, *arguments: str | Path, tokenizer_flag: bool = True) -> None:
        parser = argparse.ArgumentParser()
        prepare_data.add_arguments(parser)
        flags = ["--output", str(tmp_path / "out" / "p"), "--workers", "1"]
        flags += ["--tokenizer", str(tmp_path / "tokenizer.json")] if tokenizer_flag else []
        with pytest.raises(ConfigError, match=message):
            prepare_data.run(parser.parse_args([*flags, *map(str, arguments)]))
        assert not list((tmp_path / "out").glob("p.*"))
        assert not list((tmp_path / "out").glob("*.half*"))

    return check


def test_missing_input(refused, tmp_path) -> None:
    refused(r"nowhere\.jsonl does not exist", tmp_path / "nowhere.jsonl")


def test_empty_input(refused, tmp_path) -> None:
    (tmp_path / "a.jsonl").touch()
    refused(r"a\.jsonl is empty \(0 bytes\)", tmp_path / "a.jsonl")


def test_unreadable_input(refused, tmp_path) -> None:
    """A loop of links: no permission bits needed, so the test holds for root too."""
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    refused(r"a\.jsonl does not exist", tmp_path / "a.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*folder: Is a directory"), open_bytes(tmp_path / "folder"):
        pass


def test_folder_without_known_files(refused, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"x")
    refused(r"no files below .*in that end in \.json, \.jsonl.*--glob", tmp_path / "in")
    refused(r"no files below .*in that match \*\.csv", tmp_path / "in", "--glob", "*.csv")


def test_only_empty_documents(refused, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    refused(r"hold no text \(2 empty documents\)", tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "b"', r"a\.jsonl line 2 is not JSON: .* at column 13"),
        (b'["b"]', r"a\.jsonl line 2 is a JSON list, not an object"),
        (b'{"body": "b", "id": 3}', r"a\.jsonl line 2 has no key 'text' \(its keys: 'body', 'id'\).*--text-key"),
        (b'{"text": 7}', r"a\.jsonl line 2: 'text' is int, not text"),
        (b'{"text": null}', r"a\.jsonl line 2: 'text' is NoneType"),
        (b'{"text": "\\ud800"}', r"a\.jsonl line 2: 'text' holds half a surrogate pair"),
        ('{"text": "é"}'.encode("latin1"), r"a\.jsonl line 2 is not UTF-8: byte 10 is 0xe9.*iconv"),
    ],
)
def test_bad_json_line(refused, tmp_path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n')
    refused(message, tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    refused(message.replace("jsonl", r"jsonl\.gz", 1), tmp_path / "a.jsonl.gz")


def test_text_of_another_encoding(refused, tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes("hello wörld".encode("utf-16"))
    refused(r"a\.txt is not UTF-8: byte 0 is 0xff", tmp_path / "a.txt")


@pytest.mark.parametrize("keep", [0.5, 0.95])
def test_truncated_gzip_and_zstd(refused, tmp_path, keep: float) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is of the extra `data`")
    raw = "".join(json.dumps({"text": str(np.random.RandomState(i).bytes(50))}) + "\n" for i in range(300)).encode()
    for suffix, packed in ((".gz", gzip.compress(raw)), (".zst", zstandard.ZstdCompressor().compress(raw))):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(packed[: int(len(packed) * keep)])
        refused(rf"a\.jsonl\{suffix} is damaged or truncated", path)
        path.write_bytes(b"plain text, not compressed")
        refused(rf"a\.jsonl\{suffix} is damaged or truncated", path)


def test_bad_parquet(refused, tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is of the extra `data`")
    from pyarrow import parquet

    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    refused(r"a\.parquet is not a readable Parquet file", tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    refused(r"b\.parquet has no column 'text' \(its columns: body\)", tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "c.parquet")
    refused(r"c\.parquet row 1: 'text' is NoneType", tmp_path / "c.parquet")


@pytest.mark.parametrize(("package", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet"), ("datasets", "folder")])
def test_optional_package_that_is_missing(refused, tmp_path, monkeypatch, package: str, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("a.jsonl.zst", "a.parquet", "folder/dataset_info.json", "folder/state.json"):
        (tmp_path / file).write_bytes(b"{}")
    monkeypatch.setitem(sys.modules, package, None)  # `import` fails as where it is not installed
    refused(rf"needs the package {package}: pip install 'moe-train\[data\]'", tmp_path / name)


def test_data_set_of_several_splits(refused, tmp_path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is of the extra `data`")
    one = datasets.Dataset.from_dict({"body": ["a"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "hf"))
    refused(r"holds the splits train, test; name one of them", tmp_path / "hf")
    refused(r"train has no column 'text' \(its columns: body\)", tmp_path / "hf" / "train")


def test_flags_that_do_not_fit(refused, tmp_path, tokenizer) -> None:
    (tmp_path / "a.txt").write_text("hello")
    refused("at least one INPUT")
    refused("--tokenizer PATH .* or --train-bpe", tmp_path / "a.txt", tokenizer_flag=False)
    refused("at least 257 tokens .* vocabulary is 100", tmp_path / "a.txt", "--train-bpe", "100", tokenizer_flag=False)
    refused("--workers 0", tmp_path / "a.txt", "--workers", "0")
    refused("--eod-token <nope> is no token", tmp_path / "a.txt", "--eod-token", "<nope>")


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not a tokenizer.json"), (b'{"a": 1}', "is not a tokenizer.json"), (b"\xff\xfe", "not UTF-8")]
)
def test_tokenizer_that_is_none(tmp_path, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer at .*tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer at"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("config", ["{", "[]", '{"tokenizer_class": "NoSuch"}', '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'])
def test_tokenizer_folder_that_transformers_cannot_read_runs_no_code_of_it(tmp_path, config: str) -> None:
    pytest.importorskip("transformers", reason="transformers is of the extra `hf`")
    (tmp_path / "tokenizer_config.json").write_text(config)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match=r"transformers cannot read the tokenizer"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_output_that_is_taken_or_cannot_be_made(refused, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "file").touch()
    refused(r"cannot make the folder .*file/sub", tmp_path / "a.txt", "--output", str(tmp_path / "file" / "sub" / "p"))
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".p.lock"):
        refused(r"another process is writing .*out/p right now", tmp_path / "a.txt")


def test_tokenizer_without_end_token() -> None:
    with pytest.raises(ConfigError, match=r"none of the end-of-document tokens .*--no-eod"):
        end_token(new_bpe())


def test_model_vocabulary_smaller_than_the_tokenizers(make_pair, indexed_config) -> None:
    config = indexed_config([make_pair("a", [9] * 9)])
    config.model.vocab_size = 299
    with pytest.raises(ConfigError, match=r"model.vocab_size=299 is smaller than the tokenizer's vocabulary of 300.*=320"):
        build_data(config, "train")
    config.model.vocab_size = 300
    build_data(config, "train")
    check_vocab(train_bpe(["a"], 257), 257)


def test_no_data_half_a_pair_and_a_wrong_prefix(make_pair, indexed_config, tmp_path) -> None:
    prefix = make_pair("a", [9] * 9)
    with pytest.raises(ConfigError, match=r"neither .*a.bin.idx nor .*a.bin.bin exists. Give the prefix without `.bin`"):
        build_data(indexed_config([prefix + ".bin"]), "train")
    with pytest.raises(ConfigError, match=r"needs data.paths"):
        build_data(indexed_config([]), "train")
    part(prefix, ".bin").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"a\.idx exists but its other half a\.bin is missing"):
        build_data(indexed_config([prefix]), "train")


@pytest.mark.parametrize("missing", [1, 2, 7, 100])
def test_truncated_or_lengthened_bin(make_pair, indexed_config, missing: int) -> None:
    prefix = make_pair("a", [9] * 9)
    raw = part(prefix, ".bin").read_bytes()
    part(prefix, ".bin").write_bytes(raw[:-missing])
    with pytest.raises(ConfigError, match=rf"a\.bin is truncated: it has {180 - missing} bytes, .* 90 tokens of 2 bytes = 180"):
        build_data(indexed_config([prefix]), "train")
    part(prefix, ".bin").write_bytes(raw + b"\0\0")
    with pytest.raises(ConfigError, match=r"longer than its index"):
        build_data(indexed_config([prefix]), "train")


def test_index_truncated_at_every_byte(make_pair) -> None:
    prefix = make_pair("a", [9] * 3)
    raw = part(prefix, ".idx").read_bytes()
    for size in range(len(raw)):
        part(prefix, ".idx").write_bytes(raw[:size])
        with pytest.raises(ConfigError, match=r"a\.idx is (truncated|not an index)"):
            check_pair(prefix)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"TNTIDX\0\0\0", "not an index of megatron-core"),
        (9, b"\x02", "version 2"),
        (17, b"\x06", "token type 6, which is no integer type"),
        (17, b"\x04", "truncated: it has 60 bytes, but its index announces 30 tokens of 4 bytes"),
        (HEADER.size, b"\x0b", r"a\.bin is truncated"),
        (HEADER.size, b"\x0b\0\0\0\x09", "do not lie end to end"),
        (-8, b"\x02", "boundaries do not run from 0 to 3"),
        (-16, b"\x09", "boundaries do not run from 0 to 3"),
    ],
)
def test_corrupt_index(make_pair, place: int, value: bytes, message: str) -> None:
    prefix = make_pair("a", [9] * 3)
    raw = bytearray(part(prefix, ".idx").read_bytes())
    raw[place : place + len(value) if place + len(value) != 0 else None] = value
    part(prefix, ".idx").write_bytes(raw)
    with pytest.raises(ConfigError, match=message):
        check_pair(prefix)


def test_companions_of_another_run(make_pair, indexed_config) -> None:
    one, other = make_pair("a", [9] * 9), make_pair("b", [9] * 8)
    for suffix, message in (
        (".meta.json", "8 documents and 80 tokens, but .* 9 and 90"),
        (".bytes.npy", "8 documents, the pair beside it 9"),
    ):
        keep = part(one, suffix).read_bytes()
        part(one, suffix).write_bytes(part(other, suffix).read_bytes())
        with pytest.raises(ConfigError, match=message):
            _ = build_data(indexed_config([one]), "train").bytes_per_token
        part(one, suffix).write_bytes(b"garbage")
        with pytest.raises(ConfigError, match=rf"{suffix} (is not JSON|cannot be read)"):
            _ = build_data(indexed_config([one]), "train").bytes_per_token
        part(one, suffix).write_bytes(keep)


def test_tokens_that_the_tokenizer_does_not_have(make_pair, indexed_config, tmp_path) -> None:
    prefix = make_pair("a", [9] * 9, first=400)
    with pytest.raises(ConfigError, match=r"a\.bin holds token 4\d\d, but its tokenizer has ids 0 … 299"):
        build_data(indexed_config([prefix]), "train").batch(0, 8)
    train_bpe(["a"], 257).save(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"is not the tokenizer that .*a was made with"):
        build_data(indexed_config([prefix], tokenizer=str(tmp_path / "other.json")), "train")


def test_blend_of_two_tokenizers(make_pair, indexed_config) -> None:
    one, other = make_pair("a", [9] * 9), make_pair("b", [9] * 9)
    meta = json.loads(part(other, ".meta.json").read_text())
    part(other, ".meta.json").write_text(json.dumps({**meta, "tokenizer_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match=r"2 different tokenizers"):
        build_data(indexed_config([one, other]), "train")


@pytest.mark.parametrize("split", ["", "a,b", "98,2,0,1", "-1,2", "0,0,0", "nan,1", "inf,1", "98;2"])
def test_malformed_split(split: str) -> None:
    with pytest.raises(ConfigError, match=r"data.split="):
        parse_split(split)


def test_too_few_tokens_for_a_row_and_an_empty_validation_split(make_pair, indexed_config) -> None:
    prefix = make_pair("a", [9] * 9)
    with pytest.raises(ConfigError, match=r"train split of .* has 9 of 9 documents and 90 tokens .*too few for one row of data.seq_len=90"):
        build_data(indexed_config([prefix], seq_len=90), "train")
    assert build_data(indexed_config([prefix], seq_len=89), "train").num_sequences == 1
    with pytest.raises(ConfigError, match=r"valid split of .* has 0 of 9 documents and 0 tokens \(data.split=100,0,0\)"):
        build_data(indexed_config([prefix]), "valid")
    with pytest.raises(ConfigError, match=r"data.seq_len=1"):
        build_data(indexed_config([prefix], seq_len=1), "train")


def test_options_without_effect(make_pair, indexed_config) -> None:
    config = Config()
    config.data.paths = ["a"]
    with pytest.raises(ConfigError, match=r"data.paths=\['a'\] has no effect with data.kind=python_stdlib"):
        build_data(config, "train")
    with pytest.raises(ConfigError, match=r"data.max_bytes=5 has no effect with data.kind=indexed"):
        build_data(indexed_config([make_pair("a", [9] * 9)], max_bytes=5), "train")


def test_unknown_kind_split_and_cache_that_cannot_be_made(make_pair, indexed_config, tmp_path) -> None:
    config = indexed_config([make_pair("a", [9] * 9)])
    with pytest.raises(ConfigError, match=r"split=vaild is not known.*Did you mean `valid`"):
        build_data(config, "vaild")
    (tmp_path / "file").touch()
    config.data.cache_dir = str(tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match=r"cannot make the data cache .*MOE_TRAIN_CACHE"):
        build_data(config, "train")
    config = Config()
    config.data.kind = "index"
    with pytest.raises(ConfigError, match=r"Did you mean `indexed`"):
        build_data(config, "train")
