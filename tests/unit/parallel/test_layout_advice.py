"""Every refused layout says its numbers and a way out, and the way out passes the check that refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from moe_train.config import ConfigError
from moe_train.config.compose import compose
from moe_train.config.validate import layout_of
from parallel.layout import DEGREES, FILL, LayoutError, check_model, check_schedule, fits_model, make_layout

SHAPE: dict[str, Any] = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "num_experts": 8, "expert_hidden_size": 64}
MORE: dict[str, Any] = {"vocab_size": 1024, "ffn_hidden_size": 96, "shared_hidden_size": 128, "seq_len": 64}


def advice(message: str) -> list[tuple[list[int] | None, dict[str, int]]]:
    """(worlds, degrees) of each way out after the semicolon: 'start 4 or 8 processes with parallel.dp_shard=-1 or set parallel.tp=2'."""
    text = message.rsplit("; ", 1)[1].rstrip(".")
    ways: list[tuple[list[int] | None, dict[str, int]]] = []
    if found := re.search(r"start ([\d or]+) process\w*( with parallel\.dp_shard=-1)?", text):
        ways.append((list(map(int, re.findall(r"\d+", found[1]))), {"dp_shard": -1} if found[2] else {}))
        text = text.replace(found[0], "")
    given = [re.findall(r"parallel\.(\w+)=(-?\d+)", way) for way in text.split(" or ")]
    return ways + [(None, {name: int(value) for name, value in way}) for way in given if way]


def refused(world: int, degrees: dict[str, int], **more: Any) -> str | None:
    try:
        make_layout(world, **degrees, **more)
    except LayoutError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(5))
def test_advice_for_random_degrees_that_do_not_fit_the_world(seed: int) -> None:
    rng, count = random.Random(seed), 0
    while count < 150:
        world = rng.randrange(1, 65)
        degrees = {name: rng.choice([1, 1, 1, 2, 3, 4, 6, 8]) for name in DEGREES}
        if rng.random() < 0.6:
            degrees[rng.choice(DEGREES)] = FILL
        message = refused(world, degrees)
        if message is None:
            continue
        count += 1
        assert str(world) in message
        assert advice(message), message
        for worlds, change in advice(message):
            for other in worlds or [world]:
                assert refused(other, degrees | change) is None, (world, degrees, message)


@pytest.mark.parametrize("seed", range(5))
def test_advice_for_random_models_that_cannot_be_cut(seed: int) -> None:
    """In its world, and (free) in another one; with a model that has some legal layout, the advice passes every rule."""
    rng, count = random.Random(seed), 0
    while count < 80:
        degrees = {name: rng.choice([1, 1, 1, 2, 3, 4]) for name in DEGREES} | {"dp_shard": FILL}
        world = rng.choice([4, 6, 8, 12, 16, 24, 48])
        if refused(world, degrees) is not None:
            continue
        layout = make_layout(world, **degrees)
        shape = SHAPE | MORE | {"num_layers": rng.randrange(1, 6), "num_heads": rng.choice([4, 6]), "num_experts": rng.choice([6, 8, 10])}
        shape |= {"num_kv_heads": rng.choice([None, 2]), "seq_len": rng.choice([60, 64]), "vocab_size": rng.choice([1000, 1024])}
        if fits_model(layout, **shape):
            continue
        count += 1
        for free in (False, True):
            with pytest.raises(LayoutError) as caught:
                check_model(layout, world_is_free=free, **shape)
            [(_, change), *_] = advice(str(caught.value))
            changed = layout.degrees() | change
            other = make_layout(world, **changed) if not free else make_layout(_dense(changed), **changed)
            if not fits_model(other, **shape):
                # Two rules were broken at once: the advice mends the one it speaks of.
                with pytest.raises(LayoutError) as next_one:
                    check_model(other, world_is_free=free, **shape)
                assert _what(next_one.value) != _what(caught.value)


def _dense(degrees: dict[str, int]) -> int:
    return degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"]


def _what(error: Exception) -> str:
    """The rule alone: the message without its numbers."""
    return re.sub(r"\d+", "", str(error).split("; ")[0].split("(")[0])


@pytest.mark.parametrize(
    ("world", "degrees", "parts"),
    [
        (8, {"tp": 3, "dp_shard": -1}, ["8 processes", "tp 3 = 3", "start 6 or 9 processes or set parallel.tp=2"]),
        (8, {"tp": 2}, ["tp 2 = 2, but there are 8", "start 2 processes or set parallel.dp_shard=4"]),
        (6, {"dp_shard": 6, "ep": 4}, ["6 processes", "ep 4", "start 4 or 8 processes with parallel.dp_shard=-1 or set parallel.ep=3"]),
        (6, {"dp_shard": 6, "ep": -1, "etp": 4}, ["6 processes", "etp 4", "parallel.etp=3"]),
        (8, {"pp": -1, "dp_shard": 3}, ["8 processes", "dp_shard 3 ", "start 6 or 9 processes or set parallel.dp_shard=2"]),
        (8, {"dp_shard": -1, "tp": -1}, ["dp_shard=-1 and parallel.tp=-1", "keep parallel.dp_shard=-1 and set parallel.tp=1"]),
        (8, {"dp_shard": -1, "cp": -2}, ["parallel.cp=-2 must be at least 1", "parallel.cp=1"]),
        (7, {"dp_replicate": 2, "tp": 2}, ["= 4, but there are 7", "start 4 processes."]),
    ],
)
def test_messages_of_the_world(world: int, degrees: dict[str, int], parts: list[str]) -> None:
    message = refused(world, degrees)
    assert message is not None
    assert all(part in message for part in parts), message
    assert message.count("\n") == 0


def test_advice_about_the_world_respects_the_model() -> None:
    """tp 4 and tp 2 are both next to 3; of 6 heads only 2 can be had. Nothing fits 5 heads but tp 1 (or 5)."""
    for heads, expected in ((6, 2), (5, 1)):
        shape = SHAPE | {"num_heads": heads, "num_kv_heads": None}
        message = refused(8, {"tp": 3, "dp_shard": -1}, accepts=[lambda layout, shape=shape: fits_model(layout, **shape)])
        assert message is not None
        assert f"set parallel.tp={expected}" in message


@pytest.mark.parametrize(
    ("degrees", "model", "parts"),
    [
        ({"tp": 4}, {"num_heads": 6, "num_kv_heads": None}, ["6 attention heads", "tp=4", "set parallel.tp=2 parallel.dp_shard=4"]),
        ({"tp": 8}, {"num_kv_heads": 4}, ["4 key/value heads", "tp=8", "whole key/value heads", "set parallel.tp=4"]),
        (
            {"tp": 2},
            {"vocab_size": 1025},
            ["model.vocab_size=1025", "tp=2", "set parallel.tp=1 parallel.dp_shard=8 or model.vocab_size=1026"],
        ),
        ({"tp": 4}, {"ffn_hidden_size": 98}, ["model.ffn_hidden_size=98", "tp=4", "set parallel.tp=2"]),
        ({"tp": 4}, {"shared_hidden_size": 66}, ["shared experts' width 66", "tp=4", "set parallel.tp=2"]),
        ({"tp": 4}, {"seq_len": 66}, ["data.seq_len=66", "cp 1 × tp 4", "parallel.tp=2", "or data.seq_len=64"]),
        ({"cp": 2}, {"seq_len": 66}, ["data.seq_len=66", "divisible by 4", "zig-zag", "parallel.cp=1", "or data.seq_len=64"]),
        ({"cp": 2, "tp": 4}, {"seq_len": 68}, ["data.seq_len=68", "divisible by 8", "or data.seq_len=64"]),
        ({"ep": 8}, {"num_experts": 4}, ["4 experts", "ep=8", "a rank would hold none", "set parallel.ep=4."]),
        ({"ep": 4}, {"num_experts": 6}, ["6 experts", "ep=4", "set parallel.ep=2."]),
        ({"etp": 4}, {"expert_hidden_size": 6}, ["width 6", "etp=4", "set parallel.etp=2."]),
        ({"pp": 8}, {}, ["parallel.pp=8 stages for 4 layers", "set parallel.pp=4 parallel.dp_shard=2"]),
        ({"ep": 2}, {"num_experts": 0}, ["ep=2 and etp=1 have no effect", "set parallel.ep=1 parallel.etp=1"]),
    ],
)
def test_messages_of_the_model(degrees: dict[str, int], model: dict[str, Any], parts: list[str]) -> None:
    shape = SHAPE | MORE | model
    check_model(make_layout(8, dp_shard=8), **shape)
    with pytest.raises(LayoutError) as caught:
        check_model(make_layout(8, **({"dp_shard": -1} | degrees)), **shape)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    [(_, change), *_] = advice(str(caught.value))
    check_model(make_layout(8, **({"dp_shard": -1} | degrees | change)), **shape)
    for key, value in re.findall(r"(?:model|data)\.(\w+)=(\d+)", str(caught.value).split("; ")[1]):
        check_model(make_layout(8, **({"dp_shard": -1} | degrees)), **(shape | {key: int(value)}))


def test_a_free_world_may_grow() -> None:
    """Without a world, ep 2 instead of 3 asks for an even number of processes; where dp_shard is -1 nothing needs saying."""
    layout = make_layout(3, dp_shard=3, ep=3)
    with pytest.raises(LayoutError, match=r"set parallel\.ep=2 parallel\.dp_shard=4\."):
        check_model(layout, world_is_free=True, **SHAPE)
    with pytest.raises(LayoutError, match=r"set parallel\.ep=2\."):
        check_model(layout, world_is_free=True, dp_shard_fills=True, **SHAPE)
    with pytest.raises(LayoutError, match=r"set parallel\.ep=1\."):
        check_model(layout, **SHAPE)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "schedule", "ranks", "parts", "legal"),
    [
        (4, 3, "1f1b", None, ["4 stages", "at least 4", "there are 3"], 4),
        (8, 5, "dualpipev", 4, ["8 stages", "4 ranks", "at least 8", "there are 5"], 8),
        (8, 3, "interleaved_1f1b", 4, ["8 stages", "at least 4", "there are 3"], 4),
        (8, 11, "interleaved_1f1b", 4, ["2 rounds of 4", "there are 11"], 10),
        (12, 13, "interleaved_1f1b", 4, ["3 rounds of 4", "there are 13"], 12),
    ],
)
def test_schedules_need_micro_batches(
    stages: int, micro_batches: int, schedule: str, ranks: int | None, parts: list[str], legal: int
) -> None:
    with pytest.raises(LayoutError) as caught:
        check_schedule(stages, micro_batches, schedule, num_ranks=ranks)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    suggested = int(re.search(r"use (\d+) micro-batches", str(caught.value))[1])  # type: ignore[index]
    assert suggested == legal
    check_schedule(stages, suggested, schedule, num_ranks=ranks)


@pytest.mark.parametrize(
    ("stages", "schedule", "ranks", "legal"),
    [(8, "1f1b", 4, 4), (4, "zbv", 4, 8), (7, "dualpipev", None, 6), (9, "interleaved_1f1b", 4, 8), (4, "interleaved_1f1b", 4, 8)],
)
def test_schedules_need_stages(stages: int, schedule: str, ranks: int | None, legal: int) -> None:
    with pytest.raises(LayoutError, match=f"cannot deal {stages} stages out to {ranks or stages // 2} ranks; use {legal} stages"):
        check_schedule(stages, 64, schedule, num_ranks=ranks)
    check_schedule(legal, 64, schedule, num_ranks=ranks)


def test_schedules_that_run() -> None:
    for stages, micro_batches, schedule, ranks in (
        *((4, 1, "gpipe", None), (4, 4, "1f1b", None), (1, 1, "1f1b", 1), (8, 4, "interleaved_1f1b", None)),
        *((8, 10, "interleaved_1f1b", 4), (8, 1, "zbv", 4), (8, 8, "dualpipev", 4)),
    ):
        check_schedule(stages, micro_batches, schedule, num_ranks=ranks)
    with pytest.raises(LayoutError, match="1f1c is not known; choose one of gpipe, 1f1b"):
        check_schedule(4, 4, "1f1c")
    with pytest.raises(LayoutError, match="0 micro-batches"):
        check_schedule(4, 0, "gpipe")


@pytest.mark.parametrize(
    ("world", "overrides", "text"),
    [
        (8, ["parallel.dp_shard=-1"], "train.global_batch=16 is not divisible by micro_batch 4 × dp_replicate 1 × dp_shard 8 = 32"),
        (3, ["parallel.dp_shard=-1", "train.micro_batch=2"], "dp_shard 3 = 6; set train.global_batch=18."),
    ],
)
def test_the_global_batch_is_dealt_out_whole(world: int, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout_of(compose(overrides), world)
    assert text in str(caught.value)
    for way in re.findall(r"train\.\w+=\d+", str(caught.value).split("; ")[1]):
        assert layout_of(compose([*overrides, way]), world).dense["dp_shard"] == world
