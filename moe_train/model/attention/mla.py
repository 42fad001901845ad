"""Multi-head latent attention (DeepSeek-V2 arXiv:2405.04434 §2.1, DeepSeek-V3 arXiv:2412.19437 §2.1.1).

Shapes: B sequences, T tokens, S keys, H heads, Q query latent, K key/value latent, N width without position (nope), R rotary width, V value
width.
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


class MultiHeadLatentAttention(nn.Module):
    """x [B, T, D] -> [B, T, D].

    c^KV = RMSNorm(W^DKV x); k = [W^UK c^KV ; RoPE(W^KR x)] with one rotary key for all heads; v = W^UV c^KV;
    c^Q = RMSNorm(W^DQ x); q = [W^UQ c^Q ; RoPE(W^QR c^Q)] (or straight from x without query compression).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        a = config.attention
        self.layer, self.config = layer, a
        self.qk_dim = a.qk_nope_head_dim + a.qk_rope_head_dim
        self.scale = softmax_scale(a.rope, self.qk_dim)
        if a.q_lora_rank:
            self.q_down_proj = Linear(config.hidden_size, a.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(a.q_lora_rank, config.norm_eps)
            self.q_up_proj = Linear(a.q_lora_rank, a.num_heads * self.qk_dim, bias=False)
        else:
            self.q_proj = Linear(config.hidden_size, a.num_heads * self.qk_dim, bias=False)
        self.kv_down_proj = Linear(config.hidden_size, a.kv_lora_rank + a.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(a.kv_lora_rank, config.norm_eps)
        self.kv_up_proj = Linear(a.kv_lora_rank, a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), bias=False)
        self.o_proj = Linear(a.num_heads * a.v_head_dim, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, ctx: ForwardContext, cache: LayerCache | None = None) -> Tensor:
        a = self.config
        q = self.q_up_proj(self.q_norm(self.q_down_proj(x_BTD))) if a.q_lora_rank else self.q_proj(x_BTD)
        q_nope, q_rope = q.unflatten(-1, (a.num_heads, self.qk_dim)).split([a.qk_nope_head_dim, a.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_down_proj(x_BTD).split([a.kv_lora_rank, a.qk_rope_head_dim], dim=-1)
        latent = self.kv_norm(latent)
        cos, sin = cos_sin(a.rope, a.qk_rope_head_dim, ctx)
        q_rope = rotate(q_rope, cos, sin, a.rope.interleaved)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin, a.rope.interleaved).squeeze(2)
        if cache is not None:
            return self._decode(q_nope, q_rope, *cache.append(latent, k_rope))
        k_nope, v = self.kv_up_proj(latent).unflatten(-1, (a.num_heads, -1)).split([a.qk_nope_head_dim, a.v_head_dim], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, a.num_heads, -1)], dim=-1)
        mask = ctx.mask.dense()
        record_qk_max(ctx, self.layer, q.transpose(1, 2), k.transpose(1, 2), mask, self.scale)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, self.scale)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _decode(self, q_nope: Tensor, q_rope: Tensor, latent_BSK: Tensor, k_rope_BSR: Tensor) -> Tensor:
        """The absorbed form: queries meet the latents themselves, (q^C W^UK)·c^KV + q^R·k^R, and W^UV is applied after the weighted sum."""
        a = self.config
        up_HXK = self.kv_up_proj.weight.unflatten(0, (a.num_heads, -1))
        w_uk_HNK, w_uv_HVK = up_HXK.split([a.qk_nope_head_dim, a.v_head_dim], dim=1)
        q_latent = torch.einsum("bthn,hnk->bthk", q_nope, w_uk_HNK)
        logits = torch.einsum("bthk,bsk->bhts", q_latent, latent_BSK) + torch.einsum("bthr,bsr->bhts", q_rope, k_rope_BSR)
        mask = cached_mask(q_nope.shape[1], latent_BSK.shape[1], None, logits.device)
        weights = (logits.float() * self.scale).masked_fill(~mask, float("-inf")).softmax(-1).to(latent_BSK.dtype)
        y_latent = torch.einsum("bhts,bsk->bthk", weights, latent_BSK)
        return self.o_proj(torch.einsum("bthk,hvk->bthv", y_latent, w_uv_HVK).flatten(2))
