"""Collectives with gradients, and a count of the bytes they send.

The gradient of a piece is the sum over the ranks that used it, so each function's backward is the other one's forward:
gather (all-gather) ↔ sum and scatter (reduce-scatter); all-to-all ↔ all-to-all the other way round.

Shapes: a tensor is cut along `dim` into W equal pieces, one for each rank of the group, in rank order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_counters: list[Counter[str]] = []
"""Of the blocks entered. Not a context variable: on an accelerator backward runs in a thread of its own, which would not see it."""


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """What this rank sends to other ranks inside the block: kind -> bytes. A ring's share for gather and scatter: (W − 1) pieces."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.pop()


def count_bytes(kind: str, elements: int, tensor: Tensor) -> None:
    """Add `elements` of the tensor's dtype to every counter in force."""
    for counter in _counters:
        counter[kind] += elements * tensor.element_size()


def all_gather(piece: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The pieces of all ranks side by side along `dim`. No gradient."""
    world = dist.get_world_size(group)
    front = piece.movedim(dim, 0).contiguous()
    whole = front.new_empty(world * front.shape[0], *front.shape[1:])
    dist.all_gather_into_tensor(whole, front, group=group)
    count_bytes("all_gather", (world - 1) * piece.numel(), piece)
    return whole.movedim(0, dim)


def reduce_scatter(whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece along `dim` of the sum over ranks. ValueError when the size is not divisible. No gradient."""
    world = dist.get_world_size(group)
    if whole.shape[dim] % world:
        raise ValueError(f"dimension {dim} of {list(whole.shape)} is not divisible by the {world} ranks that share it.")
    front = whole.movedim(dim, 0).contiguous()
    piece = front.new_empty(front.shape[0] // world, *front.shape[1:])
    dist.reduce_scatter_tensor(piece, front, group=group)
    count_bytes("reduce_scatter", (world - 1) * piece.numel(), piece)
    return piece.movedim(0, dim)


def exchange(rows_RD: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """send[r] rows go to rank r, in order; receive[r] rows come from rank r, in rank order. No gradient."""
    rows_RD = rows_RD.contiguous()
    got = rows_RD.new_empty(sum(receive), *rows_RD.shape[1:])
    dist.all_to_all_single(got, rows_RD, receive, send, group=group)
    abroad = sum(send) - send[dist.get_rank(group)]
    count_bytes("all_to_all", abroad * rows_RD[:1].numel() if len(rows_RD) else 0, rows_RD)
    return got


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(piece, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange(rows_RD, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def gather(piece: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`all_gather`; backward sums the ranks' gradients of each piece."""
    return _Gather.apply(piece, dim, group)


def sum_and_scatter(whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter`; backward gathers."""
    return _SumAndScatter.apply(whole, dim, group)


def all_to_all(rows_RD: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """`exchange`; backward sends each row's gradient home."""
    return _Exchange.apply(rows_RD, send, receive, group)
