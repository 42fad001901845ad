"""Rotary position embedding (RoFormer, arXiv:2104.09864) and YaRN (arXiv:2309.00071).

Shapes: B sequences, T tokens, H heads, R rotated width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_train.config import RopeConfig
from moe_train.model.batch import ForwardContext


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(s) = 0.1 · s · ln(factor) + 1 (1 when the context is not extended)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: RopeConfig, head_dim: int) -> float:
    """head_dim^-1/2 · m(mscale_all_dim)² (DeepSeek: V2 0.707 -> 1.59×, V3 1.0 -> 1.87×)."""
    scale = head_dim**-0.5
    if config.scaling == "yarn" and config.mscale_all_dim:
        scale *= yarn_mscale(config.factor, config.mscale_all_dim) ** 2
    return scale


def _attention_factor(config: RopeConfig) -> float:
    if config.scaling != "yarn":
        return 1.0
    if config.mscale is not None and config.mscale_all_dim is not None:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def inverse_frequencies(config: RopeConfig, width: int, device: torch.device | None = None) -> Tensor:
    """fp32 [R/2]. YaRN interpolates low frequencies by `factor`, keeps high ones, and ramps linearly between (§3.2)."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequency = 1.0 / config.theta**exponent
    if config.scaling != "yarn":
        return frequency

    def dimension(rotations: float) -> float:
        return width * math.log(config.original_max_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32, device=device) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return frequency / config.factor * (1 - keep) + frequency * keep


def cos_sin(config: RopeConfig, width: int, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
    """fp32 [B, T, 1, R/2] each, times YaRN's attention factor; computed once per forward pass and shared by its layers."""
    if width not in ctx.rotations:
        angle = ctx.positions_BT[..., None].float() * inverse_frequencies(config, width, ctx.positions_BT.device)
        factor = _attention_factor(config)
        ctx.rotations[width] = (angle.cos() * factor).unsqueeze(2), (angle.sin() * factor).unsqueeze(2)
    return ctx.rotations[width]


def rotate(x_BTHR: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn each pair of x by its angle. Pairs are (2i, 2i+1) when interleaved, else (i, i + R/2)."""
    x = x_BTHR.float()
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    y = torch.stack([first, second], dim=-1).flatten(-2) if interleaved else torch.cat([first, second], dim=-1)
    return y.to(x_BTHR.dtype)
