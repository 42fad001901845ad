"""The pool of workers that every distributed test stands on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import RankFailure, World, pids


def sum_of_ranks(offset: int) -> tuple[int, int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), float(value)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize("size", [1, 2, 8, 3])
def test_worlds_of_any_size_share_the_workers(world: World, size: int) -> None:
    expected = float(sum(range(size)) + 5 * size)
    assert world.run(sum_of_ranks, size, 5) == [(rank, size, expected) for rank in range(size)]


def test_workers_live_on_from_call_to_call(world: World) -> None:
    assert world.run(pids, 2) == world.run(pids, 2)


def test_a_fault_fails_at_once_with_the_rank_and_its_traceback(world: World) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 3 failed:.*fail_on_one.*rank one has had enough"):
        world.run(fail_on_one, 3)
    assert time.monotonic() - started < 20
    assert len(world.run(sum_of_ranks, 3, 0)) == 3


def test_a_rank_that_dies_is_named(world: World) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2 died"):
        world.run(die_on_one, 2)
    assert len(world.run(sum_of_ranks, 2, 0)) == 2


def test_a_hang_ends_with_the_stack(world: World) -> None:
    with pytest.raises(RankFailure, match="rank"):
        world.run(hang_on_one, 2, seconds=3.0)
    assert len(world.run(sum_of_ranks, 2, 0)) == 2


@pytest.mark.parametrize("size", [0, 9])
def test_a_world_too_large_is_refused(world: World, size: int) -> None:
    with pytest.raises(ValueError, match=f"a world of {size} ranks; this pool runs 1 to 8"):
        world.run(pids, size)
