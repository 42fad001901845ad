"""Both meshes over the same ranks, for every combination of small degrees, and the verb that prints them."""

from __future__ import annotations

import itertools
import json

import pytest

from moe_train.cli import main
from parallel.layout import DENSE_AXES, EXPERT_AXES, Layout, LayoutError, make_layout

CASES = [
    dict(zip(("dp_replicate", "dp_shard", "tp", "pp", "ep", "etp", "cp"), degrees, strict=True))
    for degrees in itertools.product((1, 2), (1, 3), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2))
]


def layouts() -> list[Layout]:
    found = []
    for degrees in CASES:
        world = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
        if world % (degrees["pp"] * degrees["ep"] * degrees["etp"]) == 0:
            found.append(make_layout(world, **degrees))
    return found


def test_coordinates_are_a_bijection_in_both_meshes() -> None:
    assert len(layouts()) > 50
    for layout in layouts():
        for axes in (DENSE_AXES, EXPERT_AXES):
            seen = {tuple(layout.coordinates(rank)[axis] for axis in axes): rank for rank in range(layout.world_size)}
            assert len(seen) == layout.world_size
            for indices, rank in seen.items():
                assert layout.rank_of(**dict(zip(axes, indices, strict=True))) == rank


def test_groups_partition_the_world() -> None:
    for layout in layouts():
        for axis in (*DENSE_AXES, *EXPERT_AXES):
            groups = {layout.group(rank, axis) for rank in range(layout.world_size)}
            assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))


def test_what_is_left_fills_one_degree() -> None:
    for layout in layouts():
        degrees = layout.degrees()
        for name in ("dp_shard", "tp", "cp", "dp_replicate"):
            assert make_layout(layout.world_size, **degrees | {name: -1}).degrees() == degrees


@pytest.mark.parametrize(
    ("world", "degrees", "numbers"),
    [(6, {"tp": 4}, ("6", "4")), (8, {"tp": 2, "dp_shard": 2}, ("8", "4")), (8, {"dp_shard": 8, "ep": 3}, ("8", "3"))],
)
def test_a_world_that_does_not_fit_is_named(world: int, degrees: dict[str, int], numbers: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError) as error:
        make_layout(world, **degrees)
    assert all(number in str(error.value) for number in numbers)


def test_the_verb_prints_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "8", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "8" in json.dumps(shown)
    assert main(["layout", "6", "parallel.tp=4"]) == 2
    assert "Traceback" not in capsys.readouterr().err
