"""Degrees of parallelism to two meshes, each with its own divisibility rule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.layout import LayoutError, check_model, make_layout

DEGREE = st.sampled_from([1, 2, 3, 4])


@given(DEGREE, DEGREE, DEGREE, DEGREE, DEGREE, DEGREE, DEGREE)
def test_both_meshes_cover_the_world(dp_replicate, dp_shard, tp, pp, ep, etp, cp) -> None:
    world = pp * dp_replicate * dp_shard * cp * tp
    degrees = {"dp_replicate": dp_replicate, "tp": tp, "pp": pp, "ep": ep, "etp": etp, "cp": cp}
    if world % (pp * ep * etp):
        with pytest.raises(LayoutError, match=f"{world} processes are not divisible by pp {pp} × ep {ep} × etp {etp}"):
            make_layout(world, dp_shard=dp_shard, **degrees)
        return
    layout = make_layout(world, dp_shard=-1, **degrees)
    assert layout == make_layout(world, dp_shard=dp_shard, **degrees)
    assert math.prod(layout.dense.values()) == math.prod(layout.expert.values()) == world


def test_expert_degrees_do_not_multiply_the_dense_ones() -> None:
    """8 processes hold tp 4 × dp 2 and ep 8 at once."""
    layout = make_layout(8, tp=4, dp_shard=2, ep=8)
    assert layout.expert == {"pp": 1, "expert_dp": 1, "ep": 8, "etp": 1}
    assert make_layout(4, tp=4).expert["etp"] == 1


@pytest.mark.parametrize(
    ("world", "degrees", "text"),
    [
        (8, {"tp": 3, "dp_shard": -1}, "8 processes are not divisible by .* = 3"),
        (8, {"tp": 2}, "= 2, but there are 8 processes"),
        (6, {"dp_shard": 6, "ep": 4}, "6 processes are not divisible by pp 1 × ep 4 × etp 1 = 4"),
        (1, {"tp": 0}, "parallel.tp=0 must be at least 1"),
        (0, {}, "a world of 0"),
    ],
)
def test_bad_layouts(world: int, degrees: dict[str, int], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make_layout(world, **degrees)


@pytest.mark.parametrize(
    ("degrees", "model", "text"),
    [
        ({"dp_shard": 4, "ep": 4}, {"num_experts": 6}, "6 experts are not divisible by parallel.ep=4"),
        ({"tp": 4}, {"num_heads": 6}, "6 attention heads are not divisible by parallel.tp=4"),
        ({"tp": 4}, {"num_kv_heads": 2}, "2 key/value heads"),
        ({"pp": 4}, {"num_layers": 3}, "4 stages for 3 layers"),
        ({"dp_shard": 4, "etp": 4}, {"expert_hidden_size": 6}, "width 6"),
        ({"dp_shard": 4, "ep": 2}, {"num_experts": 0}, "no effect"),
    ],
)
def test_models_that_cannot_be_cut(degrees: dict[str, int], model: dict[str, int], text: str) -> None:
    shape = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "num_experts": 8, "expert_hidden_size": 64}
    check_model(make_layout(4, dp_shard=4), **shape)
    with pytest.raises(LayoutError, match=text):
        check_model(make_layout(4, **degrees), **(shape | model))
