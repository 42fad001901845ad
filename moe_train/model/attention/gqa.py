"""Grouped-query attention (arXiv:2305.13245) with the variants of Qwen3, OLMoE, Mixtral, GLM-4.5 and gpt-oss.

Shapes: B sequences, T tokens, S keys, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.model.attention.attend import attend
from moe_train.model.attention.cache import LayerCache
from moe_train.model.attention.mask import visible_after
from moe_train.model.attention.qk_max import record_qk_max
from moe_train.model.attention.rope import rotate, softmax_scale
from moe_train.model.batch import ForwardContext
from moe_train.model.linear import Linear
from moe_train.model.norm import RMSNorm


class GroupedQueryAttention(nn.Module):
    """x [B, T, D] -> [B, T, D]. H query heads share G key/value heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        a = config.attention
        self.layer, self.config = layer, a
        self.window = a.sliding_window if a.sliding_window and layer % a.sliding_window_every == 0 else None
        self.scale = softmax_scale(a.rope, a.head_dim)
        self.q_proj = Linear(config.hidden_size, a.num_heads * a.head_dim, bias=a.qkv_bias)
        self.k_proj = Linear(config.hidden_size, a.num_kv_heads * a.head_dim, bias=a.qkv_bias)
        self.v_proj = Linear(config.hidden_size, a.num_kv_heads * a.head_dim, bias=a.qkv_bias)
        self.o_proj = Linear(a.num_heads * a.head_dim, config.hidden_size, bias=a.out_bias)
        if a.qk_norm != "none":
            per_head = a.qk_norm == "per_head"
            self.q_norm = RMSNorm(a.head_dim if per_head else a.num_heads * a.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(a.head_dim if per_head else a.num_kv_heads * a.head_dim, config.norm_eps)
        self.sinks = nn.Parameter(torch.zeros(a.num_heads)) if a.sinks else None

    def forward(self, x_BTD: Tensor, ctx: ForwardContext, cache: LayerCache | None = None) -> Tensor:
        q_BTHC, k_BTGC, v_BTGC = self._project(x_BTD)
        assert ctx.rotation is not None
        interleaved = self.config.rope.interleaved
        q_BTHC, k_BTGC = rotate(q_BTHC, ctx.rotation, interleaved), rotate(k_BTGC, ctx.rotation, interleaved)
        visible = ctx.mask.visible(self.window)
        if cache is not None:
            k_BTGC, v_BTGC = cache.append(k_BTGC, v_BTGC, keep=self.window and self.window - 1)
            visible = visible_after(q_BTHC.shape[1], k_BTGC.shape[1], self.window, q_BTHC.device)
        q, k, v = q_BTHC.transpose(1, 2), k_BTGC.transpose(1, 2), v_BTGC.transpose(1, 2)
        if cache is None:
            record_qk_max(ctx, self.layer, q, k, visible, self.scale)
        y_BHTC = attend(q, k, v, visible, self.scale, self.sinks)
        return self.o_proj(y_BHTC.transpose(1, 2).flatten(2))

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, C], keys and values [B, T, G, C], normed as the config says."""
        a = self.config
        q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if a.qk_norm == "full_width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, a.head_dim)) for y in (q, k, v))
        return (self.q_norm(q), self.k_norm(k), v) if a.qk_norm == "per_head" else (q, k, v)
