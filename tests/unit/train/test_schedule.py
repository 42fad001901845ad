"""Learning rate and batch size are pure functions of the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_train.config import BatchRampConfig, ConfigError, ScheduleConfig, TrainConfig
from moe_train.train.schedule import BatchSchedule, decay_span, lr_factor


def factors(config: ScheduleConfig, total: int) -> list[float]:
    return [lr_factor(step, config, total) for step in range(total + 1)]


def test_warm_up_is_linear_and_never_zero() -> None:
    for name in ("cosine", "wsd", "constant"):
        assert factors(ScheduleConfig(name, warmup_steps=4), 100)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine() -> None:
    values = factors(ScheduleConfig("cosine", warmup_steps=10, decay_steps=90, min_lr_ratio=0.2), 100)
    assert values[50] == pytest.approx(0.6)
    assert values[30] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert values[90:] == [pytest.approx(0.2)] * 11
    assert factors(ScheduleConfig("cosine", min_lr_ratio=0.2), 100)[100] == pytest.approx(0.2)


def test_wsd() -> None:
    values = factors(ScheduleConfig("wsd", warmup_steps=5, decay_steps=20, min_lr_ratio=0.0), 100)
    assert values[5:81] == [1.0] * 76
    assert values[90] == pytest.approx(0.5)
    assert values[100] == 0.0
    assert factors(ScheduleConfig("wsd"), 100)[90:92] == [1.0, pytest.approx(1 - 0.9 / 10)]


def test_constant() -> None:
    assert factors(ScheduleConfig("constant"), 50) == [1.0] * 51


def test_decay_span_tells_what_more_steps_change() -> None:
    assert decay_span(ScheduleConfig("constant"), 10) == decay_span(ScheduleConfig("constant"), 20)
    assert decay_span(ScheduleConfig("cosine", decay_steps=8), 10) == decay_span(ScheduleConfig("cosine", decay_steps=8), 20)
    assert decay_span(ScheduleConfig("cosine"), 10) != decay_span(ScheduleConfig("cosine"), 20)
    assert decay_span(ScheduleConfig("wsd", decay_steps=8), 10) != decay_span(ScheduleConfig("wsd", decay_steps=8), 20)


@given(start=st.integers(1, 9), increment=st.integers(1, 4), levels=st.integers(0, 7), steps=st.integers(1, 25), step=st.integers(0, 40))
def test_batch_ramp_closed_form(start: int, increment: int, levels: int, steps: int, step: int) -> None:
    full = start + increment * levels
    batches = BatchSchedule(TrainConfig(global_batch=full, batch_ramp=BatchRampConfig(start, increment, steps)))
    sizes = [batches.size(s) for s in range(step)]
    assert batches.consumed(step) == sum(sizes)
    assert sizes == sorted(sizes)
    assert batches.size(0) == start
    assert batches.size(steps) == full


def test_without_ramp() -> None:
    batches = BatchSchedule(TrainConfig(global_batch=12))
    assert [batches.size(0), batches.consumed(0), batches.consumed(7)] == [12, 0, 84]


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (BatchRampConfig(4, 5, 10), r"start=4 .*global_batch=16 .*increment=5.*divides 12"),
        (BatchRampConfig(20, 1, 10), "start=20"),
        (BatchRampConfig(4, 4, 0), "steps=0 must be at least 1"),
    ],
)
def test_bad_ramps(ramp: BatchRampConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSchedule(TrainConfig(global_batch=16, batch_ramp=ramp))
    with pytest.raises(ConfigError, match="global_batch=0"):
        BatchSchedule(TrainConfig(global_batch=0))
