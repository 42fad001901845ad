"""A run's folder in use: generate and evaluate through the command line, on a real (tiny) run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moe_train.cli import main
from moe_train.recipes.generate import stream_text

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("use") / "run"
    arguments = ["+experiment=smoke", f"run.dir={folder}", "log.console=false", "demo.bigram=true", "demo.sample='def '"]
    assert main(["pretrain", *arguments, "demo.sample_tokens=10"]) == 0
    return folder


def last_record(run_dir: Path) -> dict[str, float]:
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main(["generate", *flags]) == 0
    return capsys.readouterr().out


def test_demo_results_are_kept(run_dir: Path) -> None:
    results = json.loads((run_dir / "demo.json").read_text())
    assert results["bits_per_byte"] == pytest.approx(last_record(run_dir)["bits_per_byte"])
    assert 0.5 < results["bigram_bits_per_byte"] < 8
    assert results["sample"].startswith("def ")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert results["max_vio_largest"] == max(r["max_vio"] for r in records[-results["max_vio_steps"] :])


def test_evaluate_repeats_what_training_measured(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run_dir), "--sequences", "16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loss"] == pytest.approx(last_record(run_dir)["eval_loss"])
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


def test_evaluate_a_text_predicts_each_token_but_the_first(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    count = len(Tokenizer.from_file(str(run_dir / "tokenizer.json")).encode(text.read_text()).ids)
    capsys.readouterr()
    assert main(["evaluate", str(run_dir), "--text", str(text), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == count - 1
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2) * count / text.stat().st_size)


def test_evaluate_prepared_data(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"import os\nprint(os.getcwd(), {i})\n" * 30)
    prefix = tmp_path / "out" / "data"
    assert main(["prepare-data", str(tmp_path), "--output", str(prefix), "--tokenizer", str(run_dir / "tokenizer.json")]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run_dir), "--data", str(prefix), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 0


def test_generate_is_reproducible_and_the_checkpoint_folder_works_too(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", "import ", "--max-tokens", "12", "--seed", "5")
    first = generated(capsys, str(run_dir), *flags)
    assert first.startswith("import ")
    assert generated(capsys, str(run_dir / "checkpoints" / "step_00000008"), *flags) == first
    assert generated(capsys, str(run_dir), *flags[:-1], "6") != first


def test_generate_reads_a_prompt_file(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("class A:")
    assert generated(capsys, str(run_dir), "--prompt-file", str(tmp_path / "p.txt"), "--max-tokens", "3").startswith("class A:")


def test_streamed_pieces_are_whole_characters(run_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(run_dir / "tokenizer.json"))
    text = "naïve 漢字 🙂 end"

    def tokens() -> Iterator[int]:
        yield from tokenizer.encode(text).ids

    pieces = list(stream_text(tokenizer, tokens()))
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


BAD = [
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0 must be 0"),
    (["--prompt", "a", "--temperature", "nan"], "--temperature nan"),
    (["--prompt", "a", "--top-p", "0"], "--top-p 0.0 must be above 0"),
    (["--prompt", "a", "--top-k", "0"], "--top-k 0 must be at least 1"),
    (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
    (["--prompt-file", "nowhere.txt"], "cannot read --prompt-file nowhere.txt"),
    (["--prompt", "x = 1\n" * 400], "model.max_seq_len=256"),
]


@pytest.mark.parametrize(("flags", "message"), BAD)
def test_generate_refuses(run_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["generate", str(run_dir), *flags]) == 2
    assert message in capsys.readouterr().err


def test_commands_refuse_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "none"), "--prompt", "a"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "not a whole checkpoint: it has no manifest.json" in capsys.readouterr().err


EVALUATE_BAD = [
    (["--sequences", "0"], "--sequences 0 must be at least 1"),
    (["--text", "nowhere.txt"], "cannot read --text nowhere.txt"),
    (["--text", "x", "--split", "test"], "--split test has no effect with --text"),
    (["--split", "test"], "the test split"),
    (["--data", "nowhere"], "nowhere"),
]


@pytest.mark.parametrize(("flags", "message"), EVALUATE_BAD)
def test_evaluate_refuses(run_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["evaluate", str(run_dir), *flags]) == 2
    assert message in capsys.readouterr().err
