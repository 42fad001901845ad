"""Collectives and their gradients against one process that holds everything."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel.collectives import all_to_all, counted_bytes, gather, sum_and_scatter
from tests.distributed.world import World


def values(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gather_then_weigh(dim: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    piece = values(rank, (2, 4, 3)).requires_grad_()
    shape = [2, 4, 3]
    shape[dim] *= world
    with counted_bytes() as sent:
        whole = gather(piece, dim, dist.group.WORLD)
        (whole * values(100 + rank, tuple(shape))).sum().backward()
    return whole.detach(), piece.grad, dict(sent)


def scatter_then_weigh(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    whole = values(rank, (4, 8, 12)).requires_grad_()
    piece = sum_and_scatter(whole, dim, dist.group.WORLD)
    (piece * values(100 + rank, tuple(piece.shape))).sum().backward()
    return piece.detach(), whole.grad


def send_rows(table: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    rank = dist.get_rank()
    send, receive = table[rank], [row[rank] for row in table]
    rows = values(rank, (sum(send), 3)).requires_grad_()
    with counted_bytes() as sent:
        got = all_to_all(rows, send, receive, dist.group.WORLD)
        (got * (rank + 1)).sum().backward()
    return got.detach(), rows.grad, dict(sent)


def uneven() -> None:
    sum_and_scatter(torch.zeros(5, 2), 0, dist.group.WORLD)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather(world: World, size: int, dim: int) -> None:
    pieces = [values(rank, (2, 4, 3)) for rank in range(size)]
    whole = torch.cat(pieces, dim)
    weights = sum(values(100 + rank, tuple(whole.shape)) for rank in range(size))
    for rank, (got, grad, sent) in enumerate(world.run(gather_then_weigh, size, dim)):
        assert torch.equal(got, whole)
        torch.testing.assert_close(grad, weights.chunk(size, dim)[rank])
        assert sent == {"all_gather": (size - 1) * 24 * 8, "reduce_scatter": (size - 1) * 24 * 8}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sum_and_scatter(world: World, dim: int) -> None:
    total = sum(values(rank, (4, 8, 12)) for rank in range(4))
    results = world.run(scatter_then_weigh, 4, dim)
    shape = tuple(results[0][0].shape)
    grad = torch.cat([values(100 + rank, shape) for rank in range(4)], dim)
    for rank, (piece, got) in enumerate(results):
        torch.testing.assert_close(piece, total.chunk(4, dim)[rank])
        assert torch.equal(got, grad)


@pytest.mark.parametrize(
    "table", [[[1, 2, 3], [0, 4, 1], [2, 2, 2]], [[0, 0, 5], [0, 0, 0], [0, 0, 7]], [[0, 0, 0]] * 3], ids=["mixed", "all to one", "none"]
)
def test_all_to_all_with_any_counts(world: World, table: list[list[int]]) -> None:
    rows = [values(rank, (sum(table[rank]), 3)).split(table[rank]) for rank in range(3)]
    for rank, (got, grad, sent) in enumerate(world.run(send_rows, 3, table)):
        assert torch.equal(got, torch.cat([rows[source][rank] for source in range(3)]))
        expected = torch.cat([torch.full((count, 3), float(to + 1), dtype=torch.float64) for to, count in enumerate(table[rank])])
        assert torch.equal(grad, expected)
        out = sum(table[rank]) - table[rank][rank]
        back = sum(row[rank] for row in table) - table[rank][rank]
        assert sent.get("all_to_all", 0) == (out + back) * 3 * 8


def test_pieces_must_be_equal(world: World) -> None:
    with pytest.raises(AssertionError, match=r"dimension 0 of \[5, 2\] is not divisible by the 2 ranks"):
        world.run(uneven, 2)
