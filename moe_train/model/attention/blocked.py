"""Causal attention in blocks of queries with a hand-written backward: the fast way on a CPU.

Faster there than PyTorch's fused attention (bench/records). Here a block of queries meets only the keys it may see, all
heads of a group in one matmul (their keys are never repeated), and the backward computes the block's weights again instead of keeping
them: memory grows with T, not T².

P = softmax over keys and sink of l = scale · Q Kᵀ, O = P V; dV = Pᵀ dO, dP = dO Vᵀ, dl = P ∘ (dP − rowsum(dP ∘ P)), dQ = scale · dl K,
dK = scale · dlᵀ Q; the sink is one more column of P whose dP is 0.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads, C query/key width, V value width, M = H/G, X = B·G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_train.model.attention.mask import Visible
from moe_train.model.linear import product, use_onednn

BLOCK = 64
"""Queries a block. Smaller ones skip more of the masked half, larger ones make larger products: 64 was fastest of 64 … 512 …"""
SMALLEST_ROWS = 128
"""… where a block has at least this many rows, all heads of a group counted."""
ROWS_ALONE = 256
"""Rows of a block, all heads of a group counted, from which on the groups go one by one where that makes fp32 products faster."""
ROWS_APART = 1024
"""Packed sequences of this length or more are attended to one by one, each from where its own documents begin."""


@dataclass(frozen=True)
class Block:
    """Queries start … end − 1 of the sequences `rows`, which see keys of first … last − 1. Some query may not see the keys below `common`,
    nor the last end − start of them, its own key and those after."""

    rows: slice
    start: int
    end: int
    first: int
    common: int
    last: int


def attend_in_blocks(
    q_BHTC: Tensor, k_BGSC: Tensor, v_BGSV: Tensor, visible: Visible, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """[B, H, T, V]; the T queries are the last of the S keys."""
    size = max(BLOCK, SMALLEST_ROWS * k_BGSC.shape[1] // q_BHTC.shape[1])
    blocks = blocks_of(visible, q_BHTC.shape[0], k_BGSC.shape[2], size)
    return _BlockedAttention.apply(q_BHTC, k_BGSC, v_BGSV, visible.first_BT, sinks_H, scale, blocks)


def blocks_of(visible: Visible, num_rows: int, num_keys: int, size: int) -> list[Block]:
    """All blocks of a batch."""
    first_BT = visible.first_BT
    num_queries = first_BT.shape[1]
    offset = num_keys - num_queries
    starts = list(range(0, num_queries, size))
    ends = [min(start + size, num_queries) for start in starts]
    if torch.compiler.is_compiling():
        # Compiled code must not depend on where this batch's documents begin: only on what is the same in every batch.
        low = [0 if visible.window is None else max(0, start + offset - visible.window + 1) for start in starts]
        high = [0 if visible.causal_only else end + offset for end in ends]
        return _blocks_of_rows(slice(0, num_rows), starts, ends, low, high, offset)
    # Rounded, since bf16 products of a shape not seen before cost 0.4 ms.
    low_BQ, high_BQ = first_BT[:, ::size] // BLOCK * BLOCK, first_BT[:, [end - 1 for end in ends]]
    if first_BT.shape[0] == 1 or num_queries < ROWS_APART:
        return _blocks_of_rows(slice(0, num_rows), starts, ends, low_BQ.amin(0).tolist(), high_BQ.amax(0).tolist(), offset)
    rows = zip(low_BQ.tolist(), high_BQ.tolist(), strict=True)
    return [block for b, (low, high) in enumerate(rows) for block in _blocks_of_rows(slice(b, b + 1), starts, ends, low, high, offset)]


def _blocks_of_rows(rows: slice, starts: list[int], ends: list[int], low: list[int], high: list[int], offset: int) -> list[Block]:
    return [Block(rows, *bounds, bounds[1] + offset) for bounds in zip(starts, ends, low, high, strict=True)]


def _fold(x_BHTC: Tensor, num_groups: int, block: Block) -> Tensor:
    """A block of queries, the heads of a group below each other: [X, M·n, C]."""
    part = x_BHTC[block.rows, :, block.start : block.end]
    return part.reshape(part.shape[0] * num_groups, -1, part.shape[-1])


def _matmul(a_XMK: Tensor, b_XKN: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · a · b, batched, scaled before it is rounded. [X, M, N]."""
    if a_XMK.shape[0] == 1 and use_onednn(a_XMK, a_XMK.shape[1], a_XMK.shape[2], b_XKN.shape[2]):
        y = product(a_XMK[0], b_XKN[0].t()).unsqueeze(0)
        return y if alpha == 1.0 else y.mul_(alpha)
    return torch.baddbmm(a_XMK.new_zeros(1, 1, 1), a_XMK, b_XKN, beta=0, alpha=alpha)


@dataclass(frozen=True)
class _Unit:
    """What is attended to at once: sequences, groups (and their query heads), and the blocks of those sequences, numbered from the
    first."""

    rows: slice
    groups: slice
    heads: slice
    blocks: list[Block]


def _units(q: Tensor, k: Tensor, blocks: list[Block]) -> Iterator[_Unit]:
    """The whole batch; or, where products go one by one (fp32 by oneDNN, which has no batched form), one group of one sequence after the
    other."""
    size, heads, _, width = q.shape
    groups, num_keys = k.shape[1], k.shape[2]
    largest = max(block.end - block.start for block in blocks) * heads // groups if blocks else 0
    if largest < ROWS_ALONE or not use_onednn(q, largest, width, num_keys) or torch.compiler.is_compiling():
        yield _Unit(slice(0, size), slice(0, groups), slice(0, heads), blocks)
        return
    for b in range(size):
        mine = [replace(block, rows=slice(0, 1)) for block in blocks if block.rows.start <= b < block.rows.stop]
        for g in range(groups):
            yield _Unit(slice(b, b + 1), slice(g, g + 1), slice(g * heads // groups, (g + 1) * heads // groups), mine)


def _weights(q_XMC: Tensor, k_XSC: Tensor, first_BT: Tensor, sinks_H: Tensor | None, scale: float, block: Block) -> Tensor:
    """P of one block [X, M·n, S] with the column of the sink [X, M·n, S + 1] where there is one: each row a sum of one."""
    logits = _matmul(q_XMC, k_XSC.mT, scale)
    num_queries = block.end - block.start
    by_query = logits.view(block.rows.stop - block.rows.start, -1, num_queries, block.last - block.first)
    if num_queries > 1:
        later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=logits.device).triu_(1)
        by_query[..., -num_queries:].masked_fill_(later, float("-inf"))
    if block.common > block.first:
        key = torch.arange(block.first, block.common, device=logits.device)
        rows = block.rows if first_BT.shape[0] > 1 else slice(None)
        hidden = key < first_BT[rows, block.start : block.end, None]
        by_query[..., : block.common - block.first].masked_fill_(hidden.unsqueeze(1), float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.to(logits.dtype)[None, :, None].expand(by_query.shape[0], -1, num_queries)
        logits = torch.cat([logits, sinks.reshape(*logits.shape[:2], 1)], dim=-1)
    return logits.softmax(-1)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor, sinks: Tensor | None, scale: float, blocks: list[Block]
    ) -> Tensor:
        size, heads, num_queries, _ = q.shape
        groups, value_width = v.shape[1], v.shape[-1]
        ctx.save_for_backward(q, k, v, first, sinks)
        ctx.scale, ctx.blocks = scale, blocks
        k, v = k.contiguous(), v.contiguous()
        # [B, T, H, V] in memory, the layout that the output projection reads.
        out = q.new_empty(size, num_queries, groups, heads // groups, value_width).permute(0, 2, 3, 1, 4)
        for unit in _units(q, k, blocks):
            here, mine = (unit.rows, unit.groups), (unit.rows, unit.heads)
            first_here = first[unit.rows] if first.shape[0] > 1 else first
            _forward(q[mine], k[here], v[here], first_here, None if sinks is None else sinks[unit.heads], scale, unit.blocks, out[here])
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, first, sinks = ctx.saved_tensors
        size, heads, num_queries, width = q.shape
        groups = k.shape[1]
        k, v = k.contiguous(), v.contiguous()
        grad_q = q.new_empty(size, num_queries, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
        # Sums over blocks in fp32, whatever the precision of the model.
        grad_k, grad_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for unit in _units(q, k, ctx.blocks):
            here, mine = (unit.rows, unit.groups), (unit.rows, unit.heads)
            first_here = first[unit.rows] if first.shape[0] > 1 else first
            inputs = q[mine], k[here], v[here], first_here, None if sinks is None else sinks[unit.heads]
            grads = grad_q[here], grad_k[here], grad_v[here], None if grad_sinks is None else grad_sinks[unit.heads]
            _backward(inputs, grad[mine], ctx.scale, unit.blocks, grads)
        grad_sinks = None if grad_sinks is None else grad_sinks.to(sinks.dtype)
        return grad_q.flatten(1, 2), grad_k.to(k.dtype), grad_v.to(v.dtype), None, grad_sinks, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, sinks: Tensor | None, scale: float, blocks: list[Block], out_BGMTV: Tensor
) -> None:
    groups = k.shape[1]
    k_XSC, v_XSV = k.flatten(0, 1), v.flatten(0, 1)
    for block in blocks:
        keys, values = _seen(k_XSC, groups, block), _seen(v_XSV, groups, block)
        weights = _weights(_fold(q, groups, block), keys, first, sinks, scale, block)
        target = out_BGMTV[block.rows, :, :, block.start : block.end]
        target.copy_(_matmul(weights[..., : keys.shape[1]], values).view(target.shape))


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    grad: Tensor,
    scale: float,
    blocks: list[Block],
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> None:
    """Write d(q) and add d(k), d(v) and d(sinks) to `grads`."""
    q, k, v, first, sinks = inputs
    grad_q, grad_k, grad_v, grad_sinks = grads
    groups = k.shape[1]
    k_XSC, v_XSV, grad_k, grad_v = (x.flatten(0, 1) for x in (k, v, grad_k, grad_v))
    for block in blocks:
        q_block, grad_block = _fold(q, groups, block), _fold(grad, groups, block)
        keys, values = _seen(k_XSC, groups, block), _seen(v_XSV, groups, block)
        weights = _weights(q_block, keys, first, sinks, scale, block)
        grad_weights = _matmul(grad_block, values.mT)
        if grad_sinks is None:
            grad_logits = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        else:
            with_sink = torch._softmax_backward_data(F.pad(grad_weights, (0, 1)), weights, -1, weights.dtype)
            weights, grad_logits = weights[..., :-1], with_sink[..., :-1]
            grad_sinks += with_sink[..., -1].float().view(-1, q.shape[1], block.end - block.start).sum((0, 2))
        _seen(grad_v, groups, block).add_(_matmul(weights.mT, grad_block))
        target = grad_q[block.rows, :, :, block.start : block.end]
        target.copy_(_matmul(grad_logits, keys, scale).view(target.shape))
        _seen(grad_k, groups, block).add_(_matmul(grad_logits.mT, q_block, scale))


def _seen(x_XSC: Tensor, num_groups: int, block: Block) -> Tensor:
    """The keys (or values, or their gradients) that a block meets."""
    return x_XSC[block.rows.start * num_groups : block.rows.stop * num_groups, block.first : block.last]
