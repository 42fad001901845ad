"""Causal attention in blocks of queries with a hand-written backward: the fast way on a CPU.

PyTorch's fused attention for CPUs takes 2 to 3 times longer (bench/records). Here a block of queries meets only the keys it may see, all
heads of a group in one matmul (their keys are never repeated), and the backward computes the block's weights again instead of keeping
them: memory grows with T, not T².

P = softmax(scale · Q Kᵀ + mask), O = P V; dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − rowsum(dP ∘ P)), dQ = scale · dS K, dK = scale · dSᵀ Q.

Shapes: B sequences, T tokens, H query heads, G key/value heads, M = H/G, C query/key width, V value width, X = B·G.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
"""Queries a block. Smaller ones skip more of the masked half, larger ones make larger products: 64 was fastest of 64 … 512 …"""
SMALLEST_ROWS = 128
"""… where a block has at least this many rows, all heads of a group counted."""


def attend(q_BHTC: Tensor, k_BGTC: Tensor, v_BGTV: Tensor, mask: Tensor | None, scale: float, window: int | None = None) -> Tensor:
    """[B, H, T, V]. mask: bool [B or 1, 1, T, T], True where query t sees key s, within the causal triangle and `window`; None: all of
    that."""
    trained = q_BHTC.requires_grad or k_BGTC.requires_grad or v_BGTV.requires_grad
    if q_BHTC.device.type == "cpu" and trained and q_BHTC.shape[2] == k_BGTC.shape[2]:
        return _BlockedAttention.apply(q_BHTC, k_BGTC, v_BGTV, mask, scale, window)
    gqa = q_BHTC.shape[1] != k_BGTC.shape[1]
    return F.scaled_dot_product_attention(q_BHTC, k_BGTC, v_BGTV, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)


def _blocks(num_tokens: int, size: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, end, first key that any query of the block may see); the last key is the last query."""
    for start in range(0, num_tokens, size):
        yield start, min(start + size, num_tokens), 0 if window is None else max(0, start - window + 1)


def _block_size(heads_a_group: int) -> int:
    return max(BLOCK, SMALLEST_ROWS // heads_a_group)


def _fold(x_BHTC: Tensor, num_groups: int, start: int, end: int) -> Tensor:
    """A block of queries, the heads of a group below each other: [X, M·(end − start), C]."""
    size, heads, _, width = x_BHTC.shape
    return x_BHTC[:, :, start:end].reshape(size * num_groups, heads // num_groups * (end - start), width)


def _matmul(a_XMK: Tensor, b_XKN: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · a · b, batched, scaled before it is rounded. [X, M, N]."""
    return torch.baddbmm(a_XMK.new_zeros(1, 1, 1), a_XMK, b_XKN, beta=0, alpha=alpha)


def _weights(q_XMC: Tensor, k_XSC: Tensor, mask: Tensor | None, scale: float, block: tuple[int, int, int], size: int) -> Tensor:
    """P of one block [X, M·n, S], each row a sum of one."""
    start, end, first = block
    scores = _matmul(q_XMC, k_XSC.mT, scale)
    by_query = scores.view(size, -1, end - start, end - first)
    if mask is not None:
        by_query.masked_fill_(~mask[:, :, start:end, first:end], float("-inf"))
    else:
        hidden = torch.ones(end - start, end - start, dtype=torch.bool, device=q_XMC.device).triu_(1)
        by_query[..., start - first :].masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, window: int | None) -> Tensor:
        size, heads, num_tokens, _ = q.shape
        groups, value_width = k.shape[1], v.shape[-1]
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale, ctx.window = scale, window
        k_XTC, v_XTV = k.flatten(0, 1), v.flatten(0, 1)
        # [B, T, H, V] in memory, the layout that the output projection reads.
        out = q.new_empty(size, num_tokens, groups, heads // groups, value_width).permute(0, 2, 3, 1, 4)
        for block in _blocks(num_tokens, _block_size(heads // groups), window):
            start, end, first = block
            weights = _weights(_fold(q, groups, start, end), k_XTC[:, first:end], mask, scale, block, size)
            out[:, :, :, start:end] = _matmul(weights, v_XTV[:, first:end]).view(size, groups, -1, end - start, value_width)
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        size, heads, num_tokens, width = q.shape
        groups = k.shape[1]
        k_XTC, v_XTV = k.flatten(0, 1), v.flatten(0, 1)
        grad_q = q.new_empty(size, num_tokens, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
        # Sums over blocks in fp32, whatever the precision of the model.
        grad_k, grad_v = torch.zeros_like(k_XTC, dtype=torch.float32), torch.zeros_like(v_XTV, dtype=torch.float32)
        for block in _blocks(num_tokens, _block_size(heads // groups), ctx.window):
            start, end, first = block
            q_block, grad_block = _fold(q, groups, start, end), _fold(grad, groups, start, end)
            keys, values = k_XTC[:, first:end], v_XTV[:, first:end]
            weights = _weights(q_block, keys, mask, ctx.scale, block, size)
            grad_v[:, first:end] += _matmul(weights.mT, grad_block)
            grad_scores = torch._softmax_backward_data(_matmul(grad_block, values.mT), weights, -1, weights.dtype)
            grad_q[:, :, :, start:end] = _matmul(grad_scores, keys, ctx.scale).view(size, groups, -1, end - start, width)
            grad_k[:, first:end] += _matmul(grad_scores.mT, q_block, ctx.scale)
        grad_k, grad_v = grad_k.to(k.dtype).view_as(k), grad_v.to(v.dtype).view_as(v)
        return grad_q.flatten(1, 2), grad_k, grad_v, None, None, None
