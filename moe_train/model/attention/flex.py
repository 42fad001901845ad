"""FlexAttention (arXiv:2412.05496) for accelerators: blocks of keys that no query may see are skipped, and no T × T mask is made.

Shapes: B sequences, T tokens, H query heads, G key/value heads, C query/key width, V value width, Q blocks of the row.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from moe_train.model.attention.mask import Visible

BLOCK = 128
SMALLEST_WIDTH = 16
"""Triton multiplies no smaller matrices."""


@functools.cache
def flex_is_available(device_type: str) -> bool:
    """Its kernels are compiled by Triton, for NVIDIA and AMD ("cuda" in PyTorch) and Intel."""
    return device_type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None


def flex_suits(q_BHTC: Tensor, v_BGSV: Tensor) -> bool:
    """Whether these queries are worth its kernels: a row of at least a block, heads of at least the smallest width."""
    wide = min(q_BHTC.shape[-1], v_BGSV.shape[-1]) >= SMALLEST_WIDTH
    return wide and q_BHTC.shape[2] >= BLOCK and flex_is_available(q_BHTC.device.type)


@functools.cache
def compiled() -> Callable[..., tuple[Tensor, object]]:
    return torch.compile(flex_attention)


def attend_flex(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTV: Tensor,
    visible: Visible,
    scale: float,
    sinks_H: Tensor | None = None,
    attention: Callable[..., tuple[Tensor, object]] | None = None,
) -> Tensor:
    """[B, H, T, V]. With sinks the softmax over the keys shrinks by Σ e^l / (e^z + Σ e^l) = σ(log Σ e^l − z)."""
    y, aux = (attention or compiled())(
        q_BHTC,
        k_BGTC,
        v_BGTV,
        block_mask=block_mask(visible),
        scale=scale,
        enable_gqa=q_BHTC.shape[1] != k_BGTC.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is None:
        return y
    kept_BHT = torch.sigmoid(aux.lse.float() - sinks_H.float()[:, None])  # type: ignore[attr-defined]
    return y * kept_BHT.unsqueeze(-1).to(y.dtype)


@functools.lru_cache(maxsize=4)  # of the layers of one forward pass, with and without a window
def block_mask(visible: Visible, size: int = BLOCK) -> BlockMask:
    """From the first visible keys alone. Block i of queries needs the key blocks from its first visible key to its own; those between that
    every query of it sees wholly need no mask."""
    first_BT = visible.first_BT
    batch, num_tokens = first_BT.shape
    num_blocks = -(-num_tokens // size)
    padded = torch.nn.functional.pad(first_BT, (0, num_blocks * size - num_tokens), mode="replicate")
    lowest_BQ, highest_BQ = (bound // size for bound in (padded[:, ::size], padded[:, size - 1 :: size] + size - 1))
    own_Q = torch.arange(num_blocks, device=first_BT.device)
    open_BQ = torch.minimum(highest_BQ, own_Q)
    """The first block that is wholly visible, where one is."""
    key_Q = own_Q[None, None, :]
    partial = ((key_Q >= lowest_BQ[..., None]) & (key_Q < open_BQ[..., None])) | (key_Q == own_Q[:, None])
    full = (key_Q >= open_BQ[..., None]) & (key_Q < own_Q[:, None])

    def visible_pair(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (kv >= first_BT[b if batch > 1 else 0, q])

    return BlockMask.from_kv_blocks(*_ordered(partial), *_ordered(full), size, visible_pair, (num_tokens, num_tokens))


def _ordered(blocks_BQQ: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks int32 [B, 1, Q], and their indices first int32 [B, 1, Q, Q]."""
    blocks = blocks_BQQ.unsqueeze(1)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.int()
