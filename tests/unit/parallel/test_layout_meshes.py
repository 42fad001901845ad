"""Both meshes number every rank once, row-major; groups cut the world into equal parts; what a rank holds adds up to the whole."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from itertools import combinations

import pytest

from parallel.layout import DEGREES, DENSE_AXES, EXPERT_AXES, FILL, Layout, LayoutError, even_split, make_layout, smallest_world

LARGEST = 192


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def random_degrees(rng: random.Random) -> dict[str, int]:
    """Legal degrees: the dense ones are free, ep and etp cut what a stage holds."""
    degrees = {axis: rng.choice([1, 1, 2, 2, 3, 4]) for axis in DENSE_AXES}
    stage = math.prod(degrees.values()) // degrees["pp"]
    degrees["ep"] = rng.choice(divisors(stage))
    degrees["etp"] = rng.choice(divisors(stage // degrees["ep"]))
    return degrees


def random_layouts(seed: int, count: int = 25) -> list[Layout]:
    rng, layouts = random.Random(seed), []
    while len(layouts) < count:
        degrees = random_degrees(rng)
        if (world := smallest_world(**degrees)) <= LARGEST:
            layouts.append(make_layout(world, **degrees))
    return layouts


SEEDS = pytest.mark.parametrize("seed", range(4))


@SEEDS
def test_coordinates_are_a_bijection_in_both_meshes(seed: int) -> None:
    for layout in random_layouts(seed):
        for mesh, axes in ((layout.dense, DENSE_AXES), (layout.expert, EXPERT_AXES)):
            assert tuple(mesh) == axes
            seen = []
            for rank in range(layout.world_size):
                at = layout.coordinates(rank)
                assert list(at) == [*DENSE_AXES, *EXPERT_AXES[1:]]
                assert layout.rank_of(**{axis: at[axis] for axis in axes}) == rank
                assert layout.rank_of(**{axis: at[axis] for axis in axes if mesh[axis] > 1}) == rank
                seen.append(tuple(at[axis] for axis in axes))
            # Ascending and distinct tuples: row-major order, outermost axis first.
            assert seen == sorted(set(seen))
            assert len(seen) == math.prod(mesh.values())


@SEEDS
def test_groups_partition_the_world(seed: int) -> None:
    rng = random.Random(seed)
    for layout in random_layouts(seed):
        for mesh in (layout.dense, layout.expert):
            axes = rng.choice([c for n in range(len(mesh) + 1) for c in combinations(mesh, n)])
            groups = layout.groups(axes)
            assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
            for group in groups:
                assert len(group) == math.prod(mesh[axis] for axis in axes)
                assert list(group) == sorted(group)
                for rank in group:
                    assert layout.group(rank, axes) == group
                fixed = [[layout.coordinates(rank)[axis] for axis in mesh if axis not in axes] for rank in group]
                assert all(indices == fixed[0] for indices in fixed)


@SEEDS
def test_both_meshes_agree_on_stages(seed: int) -> None:
    """A pipeline's send and receive pair ranks; a stage's dense and expert groups stay within the stage."""
    for layout in random_layouts(seed):
        stage = layout.world_size // layout.dense["pp"]
        for rank in range(layout.world_size):
            assert layout.coordinates(rank)["pp"] == rank // stage
            assert layout.group(rank, "pp") == tuple(range(rank % stage, layout.world_size, stage))
            dense, expert = layout.group(rank, DENSE_AXES[1:]), layout.group(rank, EXPERT_AXES[1:])
            assert dense == expert == tuple(range(rank // stage * stage, (rank // stage + 1) * stage))


@SEEDS
def test_minus_one_equals_the_explicit_degree(seed: int) -> None:
    for layout in random_layouts(seed):
        degrees = layout.degrees()
        for name in DEGREES:
            if name in ("ep", "etp") and layout.expert["expert_dp"] > 1:
                # expert_dp is what is left where both are given; -1 leaves nothing to it.
                filled = make_layout(layout.world_size, **(degrees | {name: FILL}))
                assert filled.expert == {**layout.expert, name: degrees[name] * layout.expert["expert_dp"], "expert_dp": 1}
                assert filled.dense == layout.dense
            else:
                assert make_layout(layout.world_size, **(degrees | {name: FILL})) == layout


@SEEDS
def test_smallest_world_is_the_smallest(seed: int) -> None:
    for layout in random_layouts(seed, count=6):
        for name in DEGREES:
            degrees = layout.degrees() | {name: FILL}
            smallest = smallest_world(**degrees)
            assert make_layout(smallest, **degrees).world_size == smallest
            for world in range(1, smallest):
                with pytest.raises(LayoutError):
                    make_layout(world, **degrees)


@SEEDS
def test_what_the_ranks_hold_is_the_whole_exactly_once(seed: int) -> None:
    """Over the ranks of one group, rows, tokens, heads, experts and layers are each dealt out once."""
    for layout in random_layouts(seed, count=10):
        d, rank = layout.degrees(), random.Random(seed).randrange(layout.world_size)
        batch, seq_len = 3 * d["dp_replicate"] * d["dp_shard"], 4 * d["cp"] * d["tp"]
        data = layout.group(rank, ("dp_replicate", "dp_shard"))
        assert [row for member in data for row in layout.rows(member, batch)] == list(range(batch))
        tokens = [[t for part in layout.tokens(member, seq_len) for t in part] for member in layout.group(rank, ("cp", "tp"))]
        assert sorted(sum(tokens, [])) == list(range(seq_len))
        assert {len(held) for held in tokens} == {4}
        assert [h for m in layout.group(rank, "tp") for h in layout.heads(m, 2 * d["tp"])] == list(range(2 * d["tp"]))
        assert [e for m in layout.group(rank, "ep") for e in layout.experts(m, 2 * d["ep"])] == list(range(2 * d["ep"]))
        layers = d["pp"] + 1
        assert [n for m in layout.group(rank, "pp") for n in layout.layers(m, layers)] == list(range(layers))


def test_zig_zag_gives_every_context_rank_the_same_causal_work() -> None:
    layout = make_layout(8, cp=4, tp=2)
    assert layout.tokens(0, 64) == [range(8)]
    assert layout.tokens(1, 64) == [range(56, 64)]
    assert make_layout(4, cp=4).tokens(3, 64) == [range(24, 40)]  # the two middle slices touch
    work = [sum(t + 1 for m in layout.group(2 * cp, "tp") for part in layout.tokens(m, 64) for t in part) for cp in range(4)]
    assert len(set(work)) == 1
    # tp runs may cross from one slice into the other.
    assert make_layout(6, cp=2, tp=3).tokens(1, 24) == [range(4, 6), range(18, 20)]


def test_layers_follow_the_split_that_is_given() -> None:
    layout = make_layout(2, pp=2)
    assert [len(part) for part in even_split(61, 8)] == [8, 8, 8, 8, 8, 7, 7, 7]
    assert layout.layers(1, 5) == range(3, 5)
    assert layout.layers(1, 5, lambda layers, stages: [range(1), range(1, layers)]) == range(1, 5)


def test_folding_by_hand() -> None:
    """8 ranks, tp 2 × dp 4 and ep 4 × etp 2: expert groups cross the data-parallel ones."""
    layout = make_layout(8, tp=2, dp_shard=4, ep=4, etp=2)
    dense, expert = {"pp": 0, "dp_replicate": 0, "dp_shard": 2, "cp": 0, "tp": 1}, {"expert_dp": 0, "ep": 2, "etp": 1}
    assert layout.coordinates(5) == dense | expert
    assert layout.group(5, "tp") == (4, 5)
    assert layout.group(5, "ep") == (1, 3, 5, 7)
    assert layout.group(5, ["dp_shard", "tp"]) == tuple(range(8))
    assert layout.group(5, ()) == (5,)
    assert layout.rank_of(ep=2, etp=1) == layout.rank_of(dp_shard=2, tp=1) == 5


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda layout: layout.coordinates(8), "rank 8 does not exist among 8 processes; choose 0 … 7"),
        (lambda layout: layout.coordinates(-1), "rank -1"),
        (lambda layout: layout.group(0, ("tp", "ep")), "axes tp, ep lie in no one mesh"),
        (lambda layout: layout.group(0, "dp"), "axes dp lie in no one mesh; choose from pp, dp_replicate"),
        (lambda layout: layout.rank_of(tp=2, dp_shard=0), "tp=2 does not exist in an axis of size 2; choose tp=1"),
        (lambda layout: layout.rank_of(tp=1), "dp_shard=0 … 3"),
        (lambda layout: layout.rows(0, 6), "6 rows are not divisible by 4 parts; use 8"),
        (lambda layout: layout.heads(0, 3), "3 heads are not divisible by 2 parts; use 4"),
    ],
)
def test_questions_without_an_answer(call, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        call(make_layout(8, tp=2, dp_shard=4, ep=4, etp=2))


def test_the_arithmetic_loads_no_torch() -> None:
    code = "import sys, parallel.layout; print([m for m in ('torch', 'numpy', 'moe_train') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
