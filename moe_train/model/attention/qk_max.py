"""The largest attention logit of each head, for QK-clip (Kimi K2, arXiv:2507.20534 §2.1). Fused attention keeps no logits, so
they are computed once more.

Shapes: B sequences, T tokens, H query heads, G key heads, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_train.model.batch import ForwardContext
from moe_train.model.recompute import is_replay

QUERIES = 128
"""Queries at once: bounds the scratch memory to B · H · QUERIES · T."""


@torch.no_grad()
def record_qk_max(ctx: ForwardContext, layer: int, q_BHTC: Tensor, k_BGTC: Tensor, mask: Tensor | None, scale: float) -> None:
    """Put max over visible keys of scale · q·k, fp32 [H], into the recorder when it asks for it (not in a recomputed pass). Padding
    rows are left out."""
    if ctx.recorder is None or not ctx.recorder.want_qk_max or is_replay():
        return
    heads, num_tokens = q_BHTC.shape[1], q_BHTC.shape[2]
    k_BHTC = k_BGTC.repeat_interleave(heads // k_BGTC.shape[1], dim=1)
    largest_H = q_BHTC.new_full((heads,), float("-inf"), dtype=torch.float32)
    for start in range(0, num_tokens, QUERIES):
        end = min(start + QUERIES, num_tokens)
        logits = (q_BHTC[:, :, start:end] @ k_BHTC[:, :, :end].mT).float() * scale
        if mask is None:
            index = torch.arange(end, device=logits.device)
            visible = index <= torch.arange(start, end, device=logits.device)[:, None]
        else:
            visible = mask[:, :, start:end, :end]
        if ctx.valid_BT is not None:
            visible = visible & ctx.valid_BT[:, None, start:end, None]
        largest_H = torch.maximum(largest_H, logits.masked_fill(~visible, float("-inf")).amax((0, 2, 3)))
    ctx.recorder.add_qk_max(layer, largest_H)
