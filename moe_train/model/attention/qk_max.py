"""The largest attention logit of each head, for QK-clip (Kimi K2, arXiv:2507.20534 §2.1). Fused attention keeps no logits, so they are
computed once more.

Shapes: B sequences, T tokens, H query heads, G key/value heads, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_train.model.attention.mask import Visible
from moe_train.model.batch import ForwardContext
from moe_train.model.recompute import is_replay

CHUNK = 256
"""Queries whose logits exist at once."""


def record_qk_max(ctx: ForwardContext, layer: int, q_BHTC: Tensor, k_BGTC: Tensor, visible: Visible, scale: float) -> None:
    """Into the recorder, where it asks for it; never again in a replay."""
    if ctx.recorder is not None and ctx.recorder.want_qk_max and not is_replay():
        ctx.recorder.add_qk_max(layer, largest_logit(q_BHTC, k_BGTC, visible, scale, ctx.mask.padding_BT))


@torch.no_grad()
def largest_logit(q_BHTC: Tensor, k_BGTC: Tensor, visible: Visible, scale: float, padding_BT: Tensor) -> Tensor:
    """fp32 [H]: max of scale · q_t · k_s over visible pairs of tokens that are not padding; -inf where there is none."""
    num_tokens, groups = q_BHTC.shape[2], k_BGTC.shape[1]
    largest_H = q_BHTC.new_full((q_BHTC.shape[1],), float("-inf"), dtype=torch.float32)
    key_T = torch.arange(num_tokens, device=q_BHTC.device)
    for start in range(0, num_tokens, CHUNK):
        end = min(start + CHUNK, num_tokens)
        q_BGMTC = q_BHTC[:, :, start:end].unflatten(1, (groups, -1))
        logits = (q_BGMTC @ k_BGTC[:, :, None, :end].mT).float().flatten(1, 2)
        later_TS = key_T[:end] > key_T[start:end, None]
        hidden_BTS = later_TS | (key_T[:end] < visible.first_BT[:, start:end, None]) | padding_BT[:, start:end, None]
        largest_H = torch.maximum(largest_H, logits.masked_fill_(hidden_BTS.unsqueeze(1), float("-inf")).amax((0, 2, 3)) * scale)
    return largest_H
