"""The load alarm speaks once for each layer that stays unbalanced."""

from __future__ import annotations

import pytest

from moe_train.train.alarm import PATIENCE, LoadAlarm


def test_warns_once_after_patience_and_again_after_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    alarm = LoadAlarm(4.0)
    values = [5.0] * (PATIENCE - 1) + [3.0] + [5.0] * (2 * PATIENCE) + [1.0] + [9.0] * PATIENCE
    for step, value in enumerate(values, start=1):
        alarm.on_step({"step": step, "max_vio_per_layer": [0.1, value]})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [f"step {2 * PATIENCE}", f"step {len(values)}"]
    assert "in MoE layer 1 the fullest expert has had more than 5 × the mean load" in lines[0]
    assert "balance.alarm_max_vio=4" in lines[0]


def test_dense_models_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    alarm = LoadAlarm(0.0)
    for step in range(2 * PATIENCE):
        alarm.on_step({"step": step})
    assert capsys.readouterr().err == ""
