"""The bench program on a tiny model: real processes, real steps, a real record."""

from __future__ import annotations

import json

import pytest

from bench import compare, experts, record
from bench.session import Participant, ParticipantError, Session

OURS = Participant("moe_train", "ours")


def test_compares_in_turn_and_writes_the_record(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    loop, broken = Participant("loop back end", "ours", "loop"), Participant("broken", "ours", "no such back end")
    table = compare.compare("tiny", "fp32", [loop, broken], rounds=3)
    pair, failed = table.pairs
    assert len(pair.ratios) == 3
    assert all(ratio > 0 for ratio in pair.ratios)
    assert pair.ratios == pytest.approx([theirs / mine for mine, theirs in zip(pair.seconds_ours, pair.seconds_theirs, strict=True)])
    assert failed.failure
    assert not failed.ratios
    assert table.peak_ours > 0
    sparse = compare.compare_ours(("tiny", OURS), ("tiny", OURS), "bf16", rounds=1)
    page = record.write([table], [experts.ExpertResult(4, 1, "auto", "fp32", [0.5, 0.6], 1.0)], [("bf16", sparse)], quick=False).read_text()
    assert "loop back end" in page
    assert f"did not run: {failed.failure}" in page
    raw = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert raw["models"][0]["pairs"][0]["seconds_ours"] == pair.seconds_ours
    assert {"command", "commit", "machine", "date", "shapes"} <= raw.keys()


def test_a_participant_that_dies_says_why() -> None:
    with pytest.raises(ParticipantError, match="no such back end"):
        Session(Participant("broken", "ours", "no such back end"), "tiny", "fp32")


def test_expert_share_is_a_ratio_of_both_times(monkeypatch) -> None:
    monkeypatch.setattr(experts, "TOKENS", 64)
    result = experts.measure(8, 4, "fp32", rounds=2)
    assert len(result.shares) == 2
    assert result.share > 0
