"""`moe-train layout`: the table, the JSON, no torch, and one line for what cannot be."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from moe_train.cli import main

EXAMPLE = ["layout", "8", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2", "model=tiny_mla_moe"]


def rows_of(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if re.match(r" +\d+ +\d", line)]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXAMPLE) == 0
    captured = capsys.readouterr()
    assert "dense mesh   pp 2 × dp_replicate 1 × dp_shard 2 × cp 1 × tp 2\n" in captured.out
    assert "expert mesh  pp 2 × expert_dp 2 × ep 2 × etp 1\n" in captured.out
    rows = rows_of(captured.out)
    assert [row[0] for row in rows] == [str(rank) for rank in range(8)]
    assert rows[3] == [*"300101110", "0-1", "8-15", "256-511", "2-3", "8-15"]
    assert re.search(r"^ tp +4 +2 +0, 1 ", captured.out, flags=re.MULTILINE)
    # The example leaves dp_shard to what is left, and says so.
    assert captured.err.startswith("parallel.dp_shard=2: it was not given")
    assert main([*EXAMPLE, "parallel.dp_shard=2"]) == 0
    again = capsys.readouterr()
    assert (again.out, again.err) == (captured.out, "")


def test_json_and_table_agree(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["layout", "8", "parallel.cp=2", "parallel.tp=2", "parallel.ep=2", "parallel.etp=2", "parallel.dp_shard=-1"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["world_size"], facts["expert"]["expert_dp"], len(facts["ranks"])) == (8, 2, 8)
    assert facts["groups"]["cp"] == {"groups": 4, "ranks_each": 2, "of_rank_0": [0, 2]}
    rank = facts["ranks"][3]
    assert rank["tokens"] == [[256, 384]]
    assert (rank["rows"], rank["heads"], rank["experts"], rank["layers"]) == ([0, 8], [2, 4], [8, 16], [0, 4])
    assert main(command) == 0
    assert rows_of(capsys.readouterr().out)[3] == [*"300011011", "0-3", "0-7", "256-383", "2-3", "8-15", "(2/2)"]


def test_a_stage_without_moe_layers_holds_no_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "4", "parallel.pp=4", "--json"]) == 0
    assert [rank["experts"] for rank in json.loads(capsys.readouterr().out)["ranks"]] == [None, [0, 16], [0, 16], [0, 16]]


def test_large_worlds_are_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["layout", "128", "parallel.dp_shard=-1", "train.global_batch=512"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert [int(row[0]) for row in rows_of(out)] == [*range(8), *range(120, 128)]
    assert "112 ranks between are left out; --all prints them" in out
    assert "0, 1, 2, 3 … 127" in out
    assert main([*command, "--all"]) == 0
    assert len(rows_of(capsys.readouterr().out)) == 128
    assert main([*command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 128


def test_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "1"]) == 0
    captured = capsys.readouterr()
    assert len(rows_of(captured.out)) == 1
    assert "groups" not in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_torch_is_loaded(flags: list[str]) -> None:
    code = f"import sys; from moe_train.cli import main; assert main({[*EXAMPLE, *flags]}) == 0; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


BAD: dict[str, tuple[str, list[str]]] = {
    "no world": ("", ["number of processes", "moe-train layout 8 parallel.tp=2"]),
    "no number": ("parallel.tp=2", ["'parallel.tp=2'"]),
    "zero": ("0", ["WORLD=0", "choose 1."]),
    "negative": ("-4", ["'-4'"]),
    "beyond every cluster": ("999999999999", ["WORLD=999999999999", "choose 100000."]),
    "tp": ("8 parallel.tp=3", ["8 processes", "tp 3", "set parallel.tp=2."]),
    "heads": ("8 parallel.tp=8", ["4 attention heads", "tp=8", "set parallel.tp=4."]),
    "key/value heads": ("8 parallel.tp=8 model=qwen3_30b_a3b", ["4 key/value heads", "tp=8", "set parallel.tp=4."]),
    "ep": ("8 parallel.ep=3 train.micro_batch=2", ["8 processes", "ep 3", "set parallel.ep=2."]),
    "experts": ("32 parallel.ep=32 train.global_batch=128", ["16 experts", "ep=32", "set parallel.ep=16."]),
    "stages": ("8 parallel.pp=8", ["pp=8 stages for 4 layers", "set parallel.pp=4."]),
    "world": ("8 parallel.dp_shard=2 parallel.tp=2", ["= 4, but there are 8", "start 4 processes or set parallel.dp_shard=4."]),
    "two open": (
        "8 parallel.tp=-1 parallel.cp=-1 model.attention.num_heads=8",
        ["only one degree", "keep parallel.tp=-1 and set parallel.cp=1."],
    ),
    "tokens": ("8 parallel.cp=4 data.seq_len=500", ["data.seq_len=500", "cp 4", "set parallel.cp=2 or data.seq_len=496."]),
    "vocabulary": (
        "8 parallel.tp=2 model.vocab_size=8193 train.micro_batch=2",
        ["vocab_size=8193", "tp=2", "set parallel.tp=1 or model.vocab_size=8194."],
    ),
    "batch": ("8", ["global_batch=16", "= 32", "set train.micro_batch=2 or train.global_batch=32."]),
    "another error": ("8 train.steps=0 parallel.tp=3", ["train.steps=0"]),
    "unknown key": ("8 paralel.tp=2", ["`parallel.tp`"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, parts = BAD[name]
    assert main(["layout", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"moe-train: error: [^\n]+\n", captured.err), captured.err
    assert all(part in captured.err for part in parts), captured.err
    # Each way out is a legal one.
    _, told, ways = captured.err.rstrip(".\n").partition("set ")
    assert bool(told) == any("set " in part for part in parts)
    for way in ways.split(" or ") if told else ():
        assert main(["layout", *arguments.split(), *way.split()]) == 0, (captured.err, capsys.readouterr().err)
