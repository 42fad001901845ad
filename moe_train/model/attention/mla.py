"""Multi-head latent attention (DeepSeek-V2 arXiv:2405.04434 §2.1, DeepSeek-V3 arXiv:2412.19437 §2.1.1).

Shapes: B sequences, T tokens, S keys, H heads, K key/value latent, N width without position (nope), R rotary width, V value width.
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
        assert ctx.rotation is not None
        q = self.q_up_proj(self.q_norm(self.q_down_proj(x_BTD))) if a.q_lora_rank else self.q_proj(x_BTD)
        q = rotate(q.unflatten(-1, (a.num_heads, -1)), ctx.rotation, a.rope.interleaved, start=a.qk_nope_head_dim)
        latent, k_rope = self.kv_down_proj(x_BTD).split([a.kv_lora_rank, a.qk_rope_head_dim], dim=-1)
        latent_BTK = self.kv_norm(latent)
        k_rope_BTR = rotate(k_rope.unsqueeze(2), ctx.rotation, a.rope.interleaved).squeeze(2)
        if cache is not None:
            past_BSX = cache.append(torch.cat([latent_BTK, k_rope_BTR], dim=-1))[0]
            if past_BSX.shape[1] > x_BTD.shape[1]:
                return self._attend_to_latents(q, past_BSX)
            # A prompt that nothing precedes takes the form of training: fewer multiplications when queries are many.
        return self._attend_to_heads(q, latent_BTK, k_rope_BTR, ctx)

    def _attend_to_heads(self, q_BTHC: Tensor, latent_BTK: Tensor, k_rope_BTR: Tensor, ctx: ForwardContext) -> Tensor:
        """Every head unpacks its own keys and values from the latent. Widths of a head: C = N + R."""
        a = self.config
        k_nope, v = self.kv_up_proj(latent_BTK).unflatten(-1, (a.num_heads, -1)).split([a.qk_nope_head_dim, a.v_head_dim], dim=-1)
        k_BTHC = torch.cat([k_nope, k_rope_BTR.unsqueeze(2).expand(-1, -1, a.num_heads, -1)], dim=-1)
        visible = ctx.mask.visible()
        q, k = q_BTHC.transpose(1, 2), k_BTHC.transpose(1, 2)
        record_qk_max(ctx, self.layer, q, k, visible, self.scale)
        y_BHTV = attend(q, k, v.transpose(1, 2), visible, self.scale)
        return self.o_proj(y_BHTV.transpose(1, 2).flatten(2))

    def _attend_to_latents(self, q_BTHC: Tensor, past_BSX: Tensor) -> Tensor:
        """The absorbed form: (q^C)ᵀ W^UK c^KV = (W^UKᵀ q^C)ᵀ c^KV, so queries meet the latents themselves, as in attention with one
        key/value head whose key is [c^KV; k^R] (X = K + R) and whose value is c^KV; W^UV is applied after the weighted sum."""
        a = self.config
        up_HXK = self.kv_up_proj.weight.unflatten(0, (a.num_heads, -1))
        w_uk_HNK, w_uv_HVK = up_HXK.split([a.qk_nope_head_dim, a.v_head_dim], dim=1)
        q_nope, q_rope = q_BTHC.split([a.qk_nope_head_dim, a.qk_rope_head_dim], dim=-1)
        q_BTHX = torch.cat([torch.einsum("bthn,hnk->bthk", q_nope, w_uk_HNK), q_rope], dim=-1)
        keys, values = past_BSX.unsqueeze(1), past_BSX[..., : a.kv_lora_rank].unsqueeze(1)
        visible = visible_after(q_BTHC.shape[1], past_BSX.shape[1], None, q_BTHC.device)
        y_BHTK = attend(q_BTHX.transpose(1, 2), keys, values, visible, self.scale)
        return self.o_proj(torch.einsum("bhtk,hvk->bthv", y_BHTK, w_uv_HVK).flatten(2))
