"""Softmax attention by the fastest exact way for the device: the one place that chooses.

softmax over the visible keys and, where a head has a sink z, over z too, which carries no value (gpt-oss):
y = Σ_s e^{l_s} v_s / (e^z + Σ_s e^{l_s}), l_s = scale · q · k_s.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads, C query/key width, V value width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moe_train.model.attention.blocked import attend_in_blocks
from moe_train.model.attention.flex import attend_flex, flex_suits
from moe_train.model.attention.mask import Visible


def attend(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSV: Tensor, visible: Visible, scale: float, sinks_H: Tensor | None = None) -> Tensor:
    """[B, H, T, V]."""
    way = attend_in_blocks if q_BHTC.device.type == "cpu" else attend_on_accelerator
    return way(q_BHTC, k_BGSC, v_BGSV, visible, scale, sinks_H)


def attend_on_accelerator(
    q_BHTC: Tensor, k_BGSC: Tensor, v_BGSV: Tensor, visible: Visible, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """PyTorch's fused attention where causal masking says it all; FlexAttention for documents, windows and sinks; where that is missing or
    does not suit, the former with a dense mask, or blocks where there are sinks."""
    num_queries, num_keys = q_BHTC.shape[2], k_BGSC.shape[2]
    triangle = visible.causal_only and num_queries in (1, num_keys)
    if num_queries == num_keys and not (triangle and sinks_H is None) and flex_suits(q_BHTC, v_BGSV):
        return attend_flex(q_BHTC, k_BGSC, v_BGSV, visible, scale, sinks_H)
    if sinks_H is not None:
        return attend_in_blocks(q_BHTC, k_BGSC, v_BGSV, visible, scale, sinks_H)
    grouped = q_BHTC.shape[1] != k_BGSC.shape[1]
    mask = None if triangle else visible.dense(num_keys)
    return F.scaled_dot_product_attention(
        q_BHTC, k_BGSC, v_BGSV, attn_mask=mask, is_causal=triangle and num_queries > 1, scale=scale, enable_gqa=grouped
    )
