"""The bench program on a tiny model: real processes, real steps, a real record."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from bench import attention, balance_shootout, compare, experts, record
from bench.session import Participant, ParticipantError, Session
from moe_train.train.metrics import read_records

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
    attended = attention.measure("fp32", packed=True, rounds=2)
    page = record.write(
        [table], [experts.ExpertResult(4, 1, "auto", "fp32", [0.5, 0.6], 1.0)], [attended], [("bf16", sparse)], quick=False
    ).read_text()
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


def test_balance_shootout_reads_what_runs_wrote(tmp_path) -> None:
    tiny = ["train.steps=8", "train.global_batch=8", "train.micro_batch=4", "data.seq_len=32"]
    tiny += ["train.batch_ramp.start=4", "train.batch_ramp.increment=4", "train.batch_ramp.steps=6", "optim.schedule.warmup_steps=0"]
    outcomes = [balance_shootout.train(method, tmp_path / method, [*tiny, "data.max_bytes=400000"]) for method in ("none", "quantile")]
    for outcome in outcomes:
        records = read_records(tmp_path / outcome.method / "metrics.jsonl")
        assert outcome.loss == pytest.approx(sum(r["loss"] for r in records[-2:]) / 2)
        assert outcome.max_vio == [r["max_vio"] for r in records[-2:]]
        assert 0 < outcome.max_vio_summed <= max(outcome.max_vio)
        assert outcome.bits_per_byte == records[-1]["bits_per_byte"]
    path = balance_shootout.write(outcomes, "seed: 1", "the command", tmp_path / "records")
    assert f"quantile | {outcomes[1].loss:.4f}" in path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["outcomes"][0]["losses"] == outcomes[0].losses
    ElementTree.fromstring(path.with_suffix(".svg").read_text())
    with pytest.raises(SystemExit, match=r"(?s)balance=none ended with code 2:.*stepss"):
        balance_shootout.train("none", tmp_path / "broken", ["train.stepss=1"])
