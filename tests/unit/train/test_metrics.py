"""metrics.jsonl: whole lines only, cut at the resumed step, no NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path

from moe_train.train.metrics import JsonLines, finite, read_records


def test_resume_cuts_later_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": s / 7}) + "\n" for s in range(1, 7)) + '{"step": 7, "lo')
    lines = JsonLines(path, resumed_step=4)
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4]
    assert path.read_text().endswith("}\n")
    lines.append({"step": 5, "loss": 0.1})
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4, 5]
    assert read_records(path)[1]["loss"] == 2 / 7


def test_a_line_of_another_kind_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": "two"}\n{"step": null}\n[3]\n7\n{"step": 4}\n')
    JsonLines(path, resumed_step=4)
    assert read_records(path) == [{"step": 1}, {"step": 4}]


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n')
    JsonLines(path, resumed_step=0)
    assert read_records(path) == []
    assert read_records(tmp_path / "none.jsonl") == []


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl", 0)
    lines.append({"step": 1, "loss": math.nan, "per_layer": [1.0, math.inf], "deep": {"a": -math.inf}})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": None, "per_layer": [1.0, None], "deep": {"a": None}}
    assert finite((1, "x")) == (1, "x")
