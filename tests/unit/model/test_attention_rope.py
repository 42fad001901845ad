"""Rotary positions and YaRN: the factors that DeepSeek's and OpenAI's models were trained with, and a rotation that is one."""

from __future__ import annotations

import math

import pytest
import torch

from moe_train.config import AttentionConfig, RopeConfig
from moe_train.config.compose import compose
from moe_train.model.attention.rope import attention_factor, inverse_frequencies, rotate, rotated_width, rotation, softmax_scale


@pytest.mark.parametrize(
    ("preset", "head_dim", "scale_factor", "cos_factor"),
    [
        ("deepseek_v2", 192, 1.5896, 1.0),
        ("deepseek_v2_lite", 192, 1.5896, 1.0),
        ("deepseek_v3", 192, 1.8738, 1.0),
        ("moonlight_16b_a3b", 192, 1.0, 1.0),
        ("gpt_oss_20b", 64, 1.0, 0.1 * math.log(32) + 1),
        ("qwen3_30b_a3b", 128, 1.0, 1.0),
    ],
)
def test_published_scales(preset, head_dim, scale_factor, cos_factor) -> None:
    """The softmax scale carries m(mscale_all_dim)², cos and sin carry m(mscale) / m(mscale_all_dim): never one for the other."""
    rope = compose([f"model={preset}", "data.seq_len=64"]).model.attention.rope
    assert softmax_scale(rope, head_dim) * head_dim**0.5 == pytest.approx(scale_factor, abs=1e-4)
    assert attention_factor(rope) == pytest.approx(cos_factor)


def test_two_mscales_that_differ() -> None:
    rope = RopeConfig(scaling="yarn", factor=40.0, mscale=0.707, mscale_all_dim=1.0)
    assert softmax_scale(rope, 64) == pytest.approx(64**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert attention_factor(rope) == pytest.approx((0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1))


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    rope = RopeConfig(scaling="yarn", factor=40.0)
    plain, stretched = inverse_frequencies(RopeConfig(), 64), inverse_frequencies(rope, 64)
    assert torch.equal(stretched[:8], plain[:8]), "more than 32 turns in the original context"
    torch.testing.assert_close(stretched[-8:], plain[-8:] / 40), "less than one turn"
    ratio = stretched / plain
    assert (ratio.diff() <= 1e-6).all()
    assert ((ratio > 1 / 40 + 1e-4) & (ratio < 1 - 1e-4)).any(), "blended between"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotated", "start"), [(8, 8, 0), (12, 4, 8), (12, 4, 0), (11, 4, 7), (10, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient(interleaved, width, rotated, start, dtype) -> None:
    """Each pair is a complex number times e^{i·angle}; other numbers pass unchanged. Odd layouts included."""
    config = AttentionConfig(kind="mla", qk_rope_head_dim=rotated, rope=RopeConfig(interleaved=interleaved))
    by = rotation(config, torch.arange(5)[None] + 3)
    x = torch.randn(2, 5, 3, width).to(dtype).requires_grad_()
    y = rotate(x, by, interleaved, start)

    def turned(x: torch.Tensor) -> torch.Tensor:
        part = x[..., start : start + rotated]
        first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        product = torch.complex(first, second) * torch.complex(by.cos.double(), by.sin.double())
        pair = torch.stack([product.real, product.imag], -1).flatten(-2) if interleaved else torch.cat([product.real, product.imag], -1)
        return torch.cat([x[..., :start], pair, x[..., start + rotated :]], -1)

    exact_x = x.detach().double().requires_grad_()
    exact = turned(exact_x)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 2**-8}
    torch.testing.assert_close(y.double(), exact, **tolerance)
    weight = torch.randn(y.shape).to(dtype)
    (grad,) = torch.autograd.grad(y, x, weight)
    (exact_grad,) = torch.autograd.grad(exact, exact_x, weight.double())
    torch.testing.assert_close(grad.double(), exact_grad, **tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_logits_depend_on_distances_alone(interleaved) -> None:
    config = AttentionConfig(kind="gqa", head_dim=16, rope=RopeConfig(interleaved=interleaved))
    q, k = torch.randn(1, 6, 1, 16), torch.randn(1, 6, 1, 16)

    def logits(start: int) -> torch.Tensor:
        by = rotation(config, torch.arange(6)[None] + start)
        return rotate(q, by, interleaved)[0, :, 0] @ rotate(k, by, interleaved)[0, :, 0].T

    torch.testing.assert_close(logits(0), logits(100), rtol=1e-4, atol=1e-4)


def test_rotated_width() -> None:
    assert rotated_width(AttentionConfig(kind="mla", qk_rope_head_dim=64)) == 64
    assert rotated_width(AttentionConfig(kind="gqa", head_dim=128, rope=RopeConfig(fraction=0.5))) == 64
