"""Grouped-query attention in every published variant against one plain formula in fp64, with and without a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_train.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from moe_train.model.attention import AttentionMask, GroupedQueryAttention, LayerCache, cache_scalars_per_token, rotation
from moe_train.model.batch import ForwardContext, document_positions

D, H, G, C = 24, 6, 2, 8

VARIANTS = {
    "mixtral": {},
    "as many key heads as query heads": {"num_kv_heads": H},
    "one key head": {"num_kv_heads": 1},
    "qwen3": {"qk_norm": "per_head", "rope": RopeConfig(theta=1e6)},
    "olmoe": {"qk_norm": "full_width"},
    "glm": {"qkv_bias": True, "qk_norm": "per_head", "rope": RopeConfig(fraction=0.5)},
    "partial pairs": {"rope": RopeConfig(fraction=0.25, interleaved=True)},
    "window": {"sliding_window": 4},
    "sinks": {"sinks": True},
    "gpt_oss": {
        "qkv_bias": True,
        "out_bias": True,
        "sinks": True,
        "sliding_window": 5,
        "sliding_window_every": 2,
        "rope": RopeConfig(theta=150_000.0, scaling="yarn", factor=32.0, original_max_seq_len=8, truncate=False),
    },
}


def build(variant: str, layer: int = 0) -> GroupedQueryAttention:
    attention = AttentionConfig(**({"kind": "gqa", "num_heads": H, "num_kv_heads": G, "head_dim": C} | VARIANTS[variant]))
    module = GroupedQueryAttention(ModelConfig(hidden_size=D, attention=attention, moe=MoEConfig(4, 2, 8)), layer)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.4)
    return module


def context(module: nn.Module, ids_BT: Tensor, start: int = 0) -> ForwardContext:
    positions_BT = document_positions(ids_BT) + start
    mask = AttentionMask(ids_BT, module.config.sliding_window)
    return ForwardContext(positions_BT, mask, rotation=rotation(module.config, positions_BT))


def plain(module: GroupedQueryAttention, x_BTD: Tensor, ids_BT: Tensor, layer: int) -> Tensor:
    """Head by head, from the definition, in fp64."""
    a, w = module.config, {name: p.detach().double() for name, p in module.named_parameters()}

    def project(name: str, heads: int) -> Tensor:
        y = x_BTD @ w[f"{name}_proj.weight"].T
        if f"{name}_proj.bias" in w:
            y = y + w[f"{name}_proj.bias"]
        norm = w.get(f"{name}_norm.weight")
        if norm is not None and a.qk_norm == "full_width":
            y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
        y = y.unflatten(-1, (heads, a.head_dim))
        if norm is not None and a.qk_norm == "per_head":
            y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
        return y

    q, k, v = project("q", a.num_heads), project("k", a.num_kv_heads), project("v", a.num_kv_heads)
    width = int(a.head_dim * a.rope.fraction)
    turn = rotation(a, document_positions(ids_BT))  # its angles and factors have tests of their own
    cos, sin = turn.cos.double(), turn.sin.double()

    def rotated(y: Tensor) -> Tensor:
        y = y.clone()
        for i in range(width // 2):
            first, second = (2 * i, 2 * i + 1) if a.rope.interleaved else (i, i + width // 2)
            p, r = y[..., first].clone(), y[..., second].clone()
            y[..., first], y[..., second] = p * cos[..., i] - r * sin[..., i], r * cos[..., i] + p * sin[..., i]
        return y

    q, k = rotated(q), rotated(k)
    window = a.sliding_window if a.sliding_window and layer % a.sliding_window_every == 0 else x_BTD.shape[1]
    distance = torch.arange(x_BTD.shape[1])[:, None] - torch.arange(x_BTD.shape[1])
    seen = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (distance >= 0) & (distance < window)
    heads = []
    for h in range(a.num_heads):
        g = h // (a.num_heads // a.num_kv_heads)
        weights = (q[:, :, h] @ k[:, :, g].mT * a.head_dim**-0.5).exp() * seen
        total = weights.sum(-1, keepdim=True) + (w["sinks"][h].exp() if a.sinks else 0)
        heads.append(weights / total @ v[:, :, g])
    y = torch.cat(heads, dim=-1) @ w["o_proj.weight"].T
    return y + w["o_proj.bias"] if a.out_bias else y


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_plain_formula(variant, layer, packed) -> None:
    module, x = build(variant, layer), torch.randn(2, 17, D)
    ids_BT = (torch.rand(2, 17) < 0.2).long().cumsum(1) if packed else torch.zeros(2, 17, dtype=torch.long)
    y = module(x, context(module, ids_BT))
    torch.testing.assert_close(y.double(), plain(module, x.double(), ids_BT, layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[1] * 17, [9, 1, 1, 4, 1, 1], [2, 15]])
def test_cached_tokens_see_what_they_see_in_training(variant, chunks) -> None:
    module, x = build(variant), torch.randn(2, 17, D)
    y = module(x, context(module, torch.zeros(2, 17, dtype=torch.long)))
    cache = LayerCache()

    def cached(part: Tensor) -> Tensor:
        return module(part, context(module, torch.zeros(part.shape[:2], dtype=torch.long), cache.length), cache)

    with torch.no_grad():
        parts = [cached(part) for part in x.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), y, rtol=1e-5, atol=1e-5)


def test_a_head_with_a_large_sink_attends_to_nothing() -> None:
    module, x = build("sinks"), torch.randn(1, 9, D)
    nn.init.constant_(module.sinks, 100.0)
    y = module(x, context(module, torch.zeros(1, 9, dtype=torch.long)))
    assert y.abs().max() < 1e-6


def test_windows_lie_on_every_nth_layer() -> None:
    assert [build("gpt_oss", layer).window for layer in range(4)] == [5, None, 5, None]
    assert [build("window", layer).window for layer in range(3)] == [4, 4, 4]


def test_cache_of_a_window_keeps_the_window() -> None:
    cache = LayerCache()
    kept = [cache.append(torch.full((1, 1, 2), float(i)), keep=3)[0][0, :, 0].tolist() for i in range(300)]
    assert kept[:5] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert kept[-1] == [296, 297, 298, 299]
    assert cache.length == 300, "positions go on"
    assert sum(buffer.shape[1] for buffer in cache._buffers) <= 64, "memory stays that of the window"


def test_growing_cache_copies_each_token_a_bounded_number_of_times() -> None:
    cache, buffers = LayerCache(), set()
    for i in range(1000):
        (past,) = cache.append(torch.full((2, 1, 1), float(i)))
        buffers.add(past.untyped_storage().data_ptr())
    assert past[1, :, 0].tolist() == list(range(1000))
    assert len(buffers) <= 6, "64, 130, 262, 526, 1054 tokens"


def test_cache_numbers_per_token() -> None:
    attention = AttentionConfig(kind="gqa", num_heads=64, num_kv_heads=8, head_dim=64)
    config = ModelConfig(num_layers=24, attention=attention)
    assert cache_scalars_per_token(config, layer=0) == 2 * 8 * 64
    assert cache_scalars_per_token(config) == 24 * 2 * 8 * 64


@pytest.mark.parametrize("variant", ["gpt_oss", "glm"])
def test_compiled_code_is_the_same_for_every_packing(variant) -> None:
    module = build(variant).double()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cut in (5, 90, 40):
            x = torch.randn(1, 130, D, dtype=torch.float64)
            ctx = context(module, torch.tensor([[0] * cut + [1] * (130 - cut)]))
            wanted, found = (torch.autograd.grad(run(x, ctx).square().sum(), list(module.parameters())) for run in (module, compiled))
            for ours, theirs in zip(found, wanted, strict=True):
                assert (ours - theirs).norm() < 1e-5 * theirs.norm(), "positions turn in fp32, all else in fp64"
