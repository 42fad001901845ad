"""Grouped-query attention (arXiv:2305.13245) with the variants of Qwen3, OLMoE, Mixtral, GLM-4.5 and gpt-oss.

Shapes: B sequences, T tokens, S keys, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.model.attention.blocked import attend
from moe_train.model.attention.cache import LayerCache
from moe_train.model.attention.mask import cached_mask
from moe_train.model.attention.qk_max import record_qk_max
from moe_train.model.attention.rope import cos_sin, rotate, softmax_scale
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
        self.rotated = int(a.head_dim * a.rope.fraction)
        self.q_proj = Linear(config.hidden_size, a.num_heads * a.head_dim, bias=a.qkv_bias)
        self.k_proj = Linear(config.hidden_size, a.num_kv_heads * a.head_dim, bias=a.qkv_bias)
        self.v_proj = Linear(config.hidden_size, a.num_kv_heads * a.head_dim, bias=a.qkv_bias)
        self.o_proj = Linear(a.num_heads * a.head_dim, config.hidden_size, bias=a.out_bias)
        if a.qk_norm != "none":
            per_head = a.qk_norm == "per_head"
            self.q_norm = RMSNorm(a.head_dim if per_head else a.num_heads * a.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(a.head_dim if per_head else a.num_kv_heads * a.head_dim, config.norm_eps)
        if a.sinks:
            self.sinks = nn.Parameter(torch.zeros(a.num_heads))

    def forward(self, x_BTD: Tensor, ctx: ForwardContext, cache: LayerCache | None = None) -> Tensor:
        a = self.config
        q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if a.qk_norm == "full_width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, a.head_dim)) for y in (q, k, v))
        if a.qk_norm == "per_head":
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = cos_sin(a.rope, self.rotated, ctx)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        if cache is None:
            mask = ctx.mask.dense(self.window)
            record_qk_max(ctx, self.layer, q.transpose(1, 2), k.transpose(1, 2), mask, self.scale)
        else:
            k, v = cache.append(k, v)
            mask = cached_mask(q.shape[1], k.shape[1], self.window, q.device)
        y = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.rotated == x.shape[-1]:
            return rotate(x, cos, sin, self.config.rope.interleaved)
        return torch.cat([rotate(x[..., : self.rotated], cos, sin, self.config.rope.interleaved), x[..., self.rotated :]], dim=-1)

    def _attend(self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, mask: Tensor | None) -> Tensor:
        if not self.config.sinks:
            return attend(q_BHTC, k_BGSC, v_BGSC, mask, self.scale, self.window)
        repeat = self.config.num_heads // self.config.num_kv_heads
        k, v = k_BGSC.repeat_interleave(repeat, 1), v_BGSC.repeat_interleave(repeat, 1)
        logits = (q_BHTC @ k.transpose(-1, -2)).float() * self.scale
        if mask is None:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~mask, float("-inf"))
        sink = self.sinks.float()[None, :, None, None].expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
        return weights.to(v.dtype) @ v
