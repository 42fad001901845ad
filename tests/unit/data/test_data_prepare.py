"""`prepare-data`: every source, any number of workers, all or nothing."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moe_train.config import ConfigError, RunError
from moe_train.data import build_data, sources
from moe_train.data import prepare as prepare_module
from moe_train.data.indexed import TokenFile
from moe_train.data.sources import find_inputs
from moe_train.data.tokenizer import END_OF_TEXT, end_token, load_tokenizer, tokenizer_hash, train_bpe
from moe_train.data.writer import SUFFIXES, file_sha256, part
from moe_train.recipes import prepare_data


def prepare(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    return prepare_data.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def tokenizer_path(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)).encode()


def documents(prefix: str | Path, tokenizer: Tokenizer) -> list[str]:
    """The texts read back; checks that each ends with the end token, once."""
    file, texts = TokenFile(str(prefix)), []
    for document in range(file.num_documents):
        ids = file.read(document, 0, int(file.document_sizes[document])).tolist()
        assert ids[-1] == 0
        assert 0 not in ids[:-1]
        texts.append(tokenizer.decode(ids[:-1], skip_special_tokens=False))
    return texts


def write_jsonl(folder: Path, texts: list[str]) -> Path:
    (folder / "a.jsonl").write_bytes(json_lines(texts))
    return folder / "a.jsonl"


def write_jsonl_gz(folder: Path, texts: list[str]) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(texts[:4])) + gzip.compress(json_lines(texts[4:])))
    return folder / "a.jsonl.gz"


def write_jsonl_zst(folder: Path, texts: list[str]) -> Path:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is of the extra `data`")
    frames = [zstandard.ZstdCompressor().compress(json_lines(half)) for half in (texts[:4], texts[4:])]
    (folder / "a.jsonl.zst").write_bytes(b"".join(frames))
    return folder / "a.jsonl.zst"


def write_text_files(folder: Path, texts: list[str]) -> Path:
    (folder / "deep" / "er").mkdir(parents=True)
    for index, text in enumerate(texts):
        path = (folder / "deep" / "er" if index > 9 else folder / "deep") / f"{index:02d}.txt"
        path.write_text(text, encoding="utf-8", newline="")
    (folder / "deep" / "er" / "14.txt").rename(folder / "deep" / "er" / "zz.txt")
    (folder / "deep" / "er" / "15.txt").rename(folder / "deep" / "er" / "zzz.txt")
    (folder / "deep" / "picture.png").write_bytes(b"\x89PNG")
    (folder / "deep" / "empty.txt").write_bytes(b"")
    return folder / "deep"


def write_text_gz(folder: Path, texts: list[str]) -> Path:
    (folder / "texts").mkdir()
    for index, text in enumerate(texts):
        (folder / "texts" / f"{index:02d}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return folder / "texts"


def write_parquet(folder: Path, texts: list[str]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is of the extra `data`")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, folder / "a.parquet", row_group_size=5)
    return folder / "a.parquet"


def write_dataset(folder: Path, texts: list[str]) -> Path:
    datasets = pytest.importorskip("datasets", reason="the package datasets is of the extra `data`")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "hf"))
    return folder / "hf"


WRITERS = [write_jsonl, write_jsonl_gz, write_jsonl_zst, write_text_files, write_text_gz, write_parquet, write_dataset]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_every_source_gives_the_same_documents(write, tmp_path, tokenizer, tokenizer_path, texts, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 3000)  # several chunks, as in a large file
    monkeypatch.setattr(sources, "ROWS_A_CHUNK", 3)
    path = write(tmp_path, texts)
    assert prepare(path, "--output", tmp_path / "out" / "p", "--tokenizer", tokenizer_path, "--workers", 1) == 0
    assert documents(tmp_path / "out" / "p", tokenizer) == texts
    meta = TokenFile(str(tmp_path / "out" / "p")).meta
    assert meta["documents"] == len(texts)
    assert meta["bytes"] == sum(len(text.encode()) for text in texts)
    assert meta["tokenizer_sha256"] == tokenizer_hash(tokenizer)
    assert meta["bin_sha256"] == file_sha256(tmp_path / "out" / "p.bin")
    assert (meta["eod_token"], meta["eod_id"]) == (END_OF_TEXT, 0)
    assert f"{len(texts)} documents" in capsys.readouterr().out


@pytest.mark.parametrize("write", [write_jsonl, write_text_files, write_parquet, write_dataset], ids=lambda write: write.__name__[6:])
def test_workers_change_nothing(write, tmp_path, tokenizer_path, texts, monkeypatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(sources, "ROWS_A_CHUNK", 3)
    monkeypatch.setattr(prepare_module, "CHUNKS_AHEAD", 1)  # more chunks than fit in flight, so that the order matters
    path = write(tmp_path, texts)
    for workers in (1, 2):
        prepare(path, "--output", tmp_path / f"p{workers}", "--tokenizer", tokenizer_path, "--workers", workers)
    for suffix in (".bin", ".idx", ".bytes.npy", ".tokenizer.json", ".meta.json"):
        assert part(tmp_path / "p1", suffix).read_bytes() == part(tmp_path / "p2", suffix).read_bytes()


def test_an_error_in_a_worker_process_names_file_and_line(tmp_path, tokenizer_path, texts, monkeypatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts) + b"{oops\n" + json_lines(texts))
    with pytest.raises(ConfigError, match=r"a\.jsonl line 17 is not JSON"):
        prepare(tmp_path / "a.jsonl", "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 2)
    assert not list(tmp_path.glob("*p.*[bi]*"))


def test_train_bpe_on_the_corpus_then_train_from_it(tmp_path, texts, indexed_config) -> None:
    path = write_jsonl(tmp_path, texts)
    assert prepare(path, "--output", tmp_path / "p", "--train-bpe", 400, "--workers", 1) == 0
    config = indexed_config([str(tmp_path / "p")], seq_len=32)
    stream = build_data(config, "train")
    assert stream.tokenizer.get_vocab_size() == 400
    assert stream.eod_id == stream.tokenizer.token_to_id(END_OF_TEXT) == 0
    assert documents(tmp_path / "p", stream.tokenizer) == texts
    assert stream.batch(0, 4).tokens_BT.shape == (4, 32)


def test_a_vocabulary_is_trained_on_a_sample_spread_over_all_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_module, "BPE_SAMPLE_BYTES", 4000)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 500)
    (tmp_path / "texts").mkdir()
    for index in range(100):
        (tmp_path / "texts" / f"{index:02d}.txt").write_text(f"text {index:02d} " + "x" * 92)
    write_jsonl(tmp_path, [f"line {index:03d} " + "y" * 91 for index in range(200)])
    sample = list(prepare_module.sample_texts(find_inputs([str(tmp_path / "texts"), str(tmp_path / "a.jsonl")], None), "text"))
    assert sum(map(len, sample)) < 6000
    numbers = [int(text.split()[1]) for text in sample if text.startswith("text")]
    assert len(numbers) > 8
    assert max(numbers) > 80
    assert any(text.startswith("line") for text in sample)


def test_text_key_glob_and_no_end_token(tmp_path, tokenizer_path, texts) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(json_lines(texts[:3], key="body"))
    (tmp_path / "in" / "b.other").write_bytes(b"other")
    prepare(
        tmp_path / "in",
        "--glob",
        "*.jsonl",
        "--text-key",
        "body",
        "--no-eod",
        "--output",
        tmp_path / "p",
        "--tokenizer",
        tokenizer_path,
        "--workers",
        1,
    )
    file = TokenFile(str(tmp_path / "p"))
    assert file.num_documents == 3
    assert file.meta["eod_id"] is None
    assert 0 not in file.read(0, 0, int(file.document_sizes[0]))


def test_an_end_token_written_in_a_text_is_text(tmp_path, tokenizer, tokenizer_path) -> None:
    """Nobody's web page ends a document: the reserved id stands only where the document ends."""
    texts = ["before <|endoftext|> after", "second"]
    for workers in (1, 2):
        prepare(write_jsonl(tmp_path, texts), "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", workers, "--force")
        assert documents(tmp_path / "p", tokenizer) == texts


def test_empty_documents_are_left_out_and_counted(tmp_path, tokenizer_path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    prepare(tmp_path / "a.jsonl", "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 1)
    assert "2 documents, 1 empty ones left out" in capsys.readouterr().out


def test_transformers_folder_names_the_end_token(tmp_path, tokenizer) -> None:
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # the fixture is shared
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert end_token(load_tokenizer(tmp_path), tmp_path) == "<stop>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert end_token(load_tokenizer(tmp_path), tmp_path) == END_OF_TEXT


def test_a_tokenizer_that_only_transformers_can_read(tmp_path, tokenizer, texts) -> None:
    """vocab.json and merges.txt, as GPT-2 was published, without a tokenizer.json."""
    pytest.importorskip("transformers", reason="transformers is of the extra `hf`")
    model = json.loads(tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_TEXT}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(texts[0]).ids == tokenizer.encode(texts[0]).ids
    assert end_token(loaded, tmp_path) == END_OF_TEXT


def test_an_existing_pair_is_kept_unless_forced(tmp_path, tokenizer, tokenizer_path, texts) -> None:
    path = write_jsonl(tmp_path, texts)
    prepare(path, "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 1)
    before = (tmp_path / "p.bin").read_bytes()
    path.write_bytes(json_lines(texts[:2]))
    with pytest.raises(ConfigError, match=r"p\.bin and .*p\.idx exist already.*--force"):
        prepare(path, "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 1)
    assert (tmp_path / "p.bin").read_bytes() == before
    prepare(path, "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 1, "--force")
    assert documents(tmp_path / "p", tokenizer) == texts[:2]


def test_a_failed_second_preparation_leaves_the_first_pair_whole(tmp_path, tokenizer, tokenizer_path, texts) -> None:
    path = write_jsonl(tmp_path, texts)
    prepare(path, "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 1)
    path.write_bytes(json_lines(texts) + b"not json\n")
    with pytest.raises(ConfigError):
        prepare(path, "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 1, "--force")
    assert documents(tmp_path / "p", tokenizer) == texts
    assert not list(tmp_path.glob(".p.half*"))


KILLED = """
import sys
from moe_train.data.tokenizer import load_tokenizer
from moe_train.data.writer import TokenWriter
with TokenWriter(sys.argv[1], load_tokenizer(sys.argv[2]), "<|endoftext|>", {}) as writer:
    while True:
        writer.add([1, 2, 3] * 1000, 9)
        print("writing", flush=True)
"""


def test_a_killed_preparation_leaves_nothing_that_opens_and_the_next_one_succeeds(tmp_path, tokenizer, tokenizer_path, texts) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "p"), str(tokenizer_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not [part(tmp_path / "p", suffix) for suffix in SUFFIXES if part(tmp_path / "p", suffix).exists()]
    path = write_jsonl(tmp_path, texts)
    prepare(path, "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 1)
    assert documents(tmp_path / "p", tokenizer) == texts


TWO_WORKERS = """
import sys
from moe_train.config import RunError
from moe_train.data import prepare
from moe_train.data.tokenizer import load_tokenizer
try:
    prepare.prepare([sys.argv[1]], sys.argv[2], load_tokenizer(sys.argv[3]), None, workers=2)
except RunError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the worker processes through /proc")
def test_a_worker_that_is_killed_while_it_starts_ends_the_preparation_with_one_message(tmp_path, texts) -> None:
    """With a tokenizer larger than a pipe's buffer, which once left the parent waiting for ever."""
    large = train_bpe([" ".join(f"{number:x}" for number in range(40_000))], 6000)
    large.save(str(tmp_path / "large.json"))
    assert (tmp_path / "large.json").stat().st_size > 100_000
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(texts) * 100)
    command = [sys.executable, "-c", TWO_WORKERS, str(path), str(tmp_path / "p"), str(tmp_path / "large.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        children, workers = Path(f"/proc/{process.pid}/task/{process.pid}/children"), []
        while not workers and process.poll() is None:
            workers = [pid for pid in children.read_text().split() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(workers[0]), signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "a worker process died" in out
    assert not list(tmp_path.glob("p.*"))
    assert not list(tmp_path.glob(".p.half*"))


def test_a_pool_that_breaks_while_work_is_handed_in_says_so(tmp_path, texts, monkeypatch) -> None:
    """Python 3.11's pool may close its pipe between the check and the use: `submit` then raises an OSError without a number."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(texts))

    def submit(*_):
        raise OSError("handle is closed")

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    with pytest.raises(RunError, match="a worker process died"):
        prepare_module.prepare([str(path)], str(tmp_path / "p"), 300, END_OF_TEXT, workers=2)
    assert not list(tmp_path.glob("p.*"))


def test_an_input_that_cannot_be_read_is_not_blamed_on_a_worker(tmp_path, texts, monkeypatch) -> None:
    """Arrow raises OSErrors without a number too."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(texts))

    readable = prepare_module.chunks

    def unreadable(paths, limit_each=None):
        if limit_each is None:  # not while the tokenizer is trained
            raise OSError("corrupt page header")
        yield from readable(paths, limit_each)

    monkeypatch.setattr(prepare_module, "chunks", unreadable)
    with pytest.raises(RunError, match="corrupt page header"):
        prepare_module.prepare([str(path)], str(tmp_path / "p"), 300, END_OF_TEXT, workers=2)
    assert not list(tmp_path.glob("p.*"))


@pytest.mark.parametrize("number", range(len(SUFFIXES)))
def test_an_interruption_between_any_two_renames_never_shows_a_mixed_pair(make_pair, indexed_config, number: int, monkeypatch) -> None:
    """A new pair replaces an old one: at every moment the name shows the old pair, the new pair, or an error."""
    old = make_pair("a", [20] * 5)
    rename, count = Path.rename, 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count > number:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_pair("a", [30] * 7)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ConfigError, match=r"missing|no data"):
        TokenFile(old)


NO_SPACE = """
import resource, sys
from moe_train.data.prepare import prepare
from moe_train.data.tokenizer import load_tokenizer
from moe_train.config import RunError
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
try:
    prepare([sys.argv[1]], sys.argv[2], load_tokenizer(sys.argv[3]), "<|endoftext|>", workers=1)
except RunError as error:
    print(error)
"""


def test_no_room_for_the_output_is_a_run_error_and_leaves_nothing(tmp_path, tokenizer_path, texts) -> None:
    """The operating system refuses the write past 4,000 bytes, as a full disk does."""
    command = [sys.executable, "-c", NO_SPACE, str(write_jsonl(tmp_path, texts)), str(tmp_path / "p"), str(tokenizer_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "File too large" in done.stdout
    assert "Nothing was left" in done.stdout
    assert not list(tmp_path.glob("p.*"))
    assert not list(tmp_path.glob(".p.half*"))


def test_a_progress_bar_on_a_terminal(tmp_path, tokenizer_path, texts) -> None:
    code = "import sys; from moe_train.data.prepare import prepare; prepare([sys.argv[1]], sys.argv[2], 300, None, workers=1)"
    command = [sys.executable, "-c", code, str(write_jsonl(tmp_path, texts)), str(tmp_path / "p")]
    terminal, inside = os.openpty()
    done = subprocess.run(command, stderr=inside, stdout=subprocess.PIPE, timeout=120, env={**os.environ, "TERM": "xterm"})
    os.close(inside)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert done.stdout == b""
    assert "training the tokenizer" in shown
    assert "tokenizing" in shown


def test_nothing_on_stderr_when_it_is_no_terminal(tmp_path, tokenizer_path, texts, capfd) -> None:
    prepare(write_jsonl(tmp_path, texts), "--output", tmp_path / "p", "--tokenizer", tokenizer_path, "--workers", 2)
    assert capfd.readouterr().err == ""
