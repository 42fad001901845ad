"""Rotary position embedding (RoFormer, arXiv:2104.09864) and YaRN (arXiv:2309.00071).

Shapes: B sequences, T tokens, H heads, C head width, R rotated width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_train.config import AttentionConfig, RopeConfig


class Rotation(NamedTuple):
    """fp32 [B, T, 1, R/2] each, times YaRN's attention factor. Made once in a forward pass and shared by all layers."""

    cos: Tensor
    sin: Tensor


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(s) = 0.1 · s · ln(factor) + 1 (1 when the context is not extended)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: RopeConfig, head_dim: int) -> float:
    """head_dim^-1/2 · m(mscale_all_dim)² (DeepSeek: V2 0.707 -> 1.59×, V3 1.0 -> 1.87×)."""
    scale = head_dim**-0.5
    if config.scaling == "yarn" and config.mscale_all_dim:
        scale *= yarn_mscale(config.factor, config.mscale_all_dim) ** 2
    return scale


def attention_factor(config: RopeConfig) -> float:
    """What YaRN multiplies cos and sin by: m(mscale) / m(mscale_all_dim), or m(1) where the model names neither."""
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


def rotated_width(config: AttentionConfig) -> int:
    """R: the decoupled part of MLA's heads, the first `fraction` of GQA's."""
    return config.qk_rope_head_dim if config.kind == "mla" else int(config.head_dim * config.rope.fraction)


def rotation(config: AttentionConfig, positions_BT: Tensor) -> Rotation:
    """Angle p · θ^(−2i/R) of pair i at position p."""
    angle = positions_BT[..., None].float() * inverse_frequencies(config.rope, rotated_width(config), positions_BT.device)
    factor = attention_factor(config.rope)
    return Rotation((angle.cos() * factor).unsqueeze(2), (angle.sin() * factor).unsqueeze(2))


def rotate(x_BTHC: Tensor, by: Rotation, interleaved: bool, start: int = 0) -> Tensor:
    """Turn the R numbers from `start` of each head, pair by pair, in fp32; the others are copied. Pairs are (2i, 2i + 1) when
    interleaved, else (i, i + R/2)."""
    if torch.compiler.is_compiling():  # a compiler fuses the plain form and derives its own backward
        end = start + 2 * by.cos.shape[-1]
        turned = _turn_pairs(x_BTHC[..., start:end].float(), by, interleaved).to(x_BTHC.dtype)
        return torch.cat([x_BTHC[..., :start], turned, x_BTHC[..., end:]], dim=-1)
    return _Rotate.apply(x_BTHC, by.cos, by.sin, interleaved, start)


def _turn_pairs(x: Tensor, by: Rotation, interleaved: bool) -> Tensor:
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    first, second = first * by.cos - second * by.sin, second * by.cos + first * by.sin
    return torch.stack([first, second], dim=-1).flatten(-2) if interleaved else torch.cat([first, second], dim=-1)


class _Rotate(torch.autograd.Function):
    """A rotation's backward is the rotation by the opposite angle. 1.4 (halves) to 7 times (pairs) faster than autograd of
    the plain form in fp32 on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, start: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.start = interleaved, start
        return _turned_copy(x, Rotation(cos, sin), interleaved, start)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned_copy(grad, Rotation(cos, -sin), ctx.interleaved, ctx.start), None, None, None, None


def _turned_copy(x: Tensor, by: Rotation, interleaved: bool, start: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    end = start + 2 * by.cos.shape[-1]
    if end - start < x.shape[-1]:
        out.copy_(x)
    part, turned = x[..., start:end].float(), out[..., start:end]
    if not interleaved:
        (a, b), (first, second) = part.chunk(2, dim=-1), turned.chunk(2, dim=-1)
        first.copy_((a * by.cos).addcmul_(b, by.sin, value=-1))
        second.copy_((b * by.cos).addcmul_(a, by.sin))
    elif _has_even_layout(part) and _has_even_layout(turned):
        # Neighbours are the real and imaginary part of a complex number: one multiplication turns them, in one pass over memory.
        angle = torch.complex(by.cos, by.sin)
        if turned.dtype == part.dtype:
            torch.mul(_as_complex(part), angle, out=_as_complex(turned))
        else:
            turned.copy_(torch.view_as_real(_as_complex(part) * angle).flatten(-2))
    else:
        turned.copy_(_turn_pairs(part, by, interleaved))
    return out


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _has_even_layout(x: Tensor) -> bool:
    """Whether pairs can be viewed as complex numbers."""
    return x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
