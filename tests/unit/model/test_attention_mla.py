"""Multi-head latent attention against the paper's equations, written out token by token and head by head in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from moe_train.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from moe_train.model.attention import AttentionMask, LayerCache, MultiHeadLatentAttention, cache_scalars_per_token, rotation
from moe_train.model.batch import PADDING, ForwardContext, document_positions

D, H, Q, K, N, R, V = 20, 3, 7, 9, 6, 4, 5
"""Hidden, heads, query latent, key/value latent, widths without and with position, value width: all different."""
YARN = RopeConfig(scaling="yarn", factor=40.0, original_max_seq_len=8, mscale=0.707, mscale_all_dim=0.5)


def build(q_lora_rank: int | None, rope: RopeConfig) -> MultiHeadLatentAttention:
    widths = {"q_lora_rank": q_lora_rank, "kv_lora_rank": K, "qk_nope_head_dim": N, "qk_rope_head_dim": R, "v_head_dim": V}
    attention = AttentionConfig(kind="mla", num_heads=H, rope=rope, **widths)
    layer = MultiHeadLatentAttention(ModelConfig(hidden_size=D, attention=attention, moe=MoEConfig(4, 2, 8)), layer=0)
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.4)
    return layer


def context(layer: nn.Module, ids_BT: Tensor, start: int = 0) -> ForwardContext:
    positions_BT = document_positions(ids_BT) + start
    return ForwardContext(positions_BT, AttentionMask(ids_BT), rotation=rotation(layer.config, positions_BT))


def rope_of_paper(x: Tensor, position: int, config: RopeConfig) -> Tensor:
    """R numbers turned by their angles, one pair after the other."""
    y, width = x.clone(), x.shape[-1]
    for i in range(width // 2):
        frequency, size = config.theta ** (-2 * i / width), 1.0
        if config.scaling == "yarn":
            # A dimension that turns more than beta_fast times in the original context stays; less than beta_slow times: interpolated.
            def dimension(turns: float) -> float:
                return width * math.log(config.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

            low, high = max(math.floor(dimension(config.beta_fast)), 0), min(math.ceil(dimension(config.beta_slow)), width - 1)
            interpolated = min(max((i - low) / max(high - low, 0.001), 0), 1)
            frequency = frequency * (1 - interpolated) + frequency / config.factor * interpolated
            size = (0.1 * config.mscale * math.log(config.factor) + 1) / (0.1 * config.mscale_all_dim * math.log(config.factor) + 1)
        a, b = (2 * i, 2 * i + 1) if config.interleaved else (i, i + width // 2)
        c, s = size * math.cos(position * frequency), size * math.sin(position * frequency)
        y[a], y[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return y


def mla_of_paper(layer: MultiHeadLatentAttention, x_TD: Tensor, config: RopeConfig) -> Tensor:
    """arXiv:2405.04434 eq. 9-19 for one document, with weights in fp64."""
    w = {name: p.detach().double() for name, p in layer.named_parameters()}

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    scale = (N + R) ** -0.5
    if config.scaling == "yarn":
        scale *= (0.1 * config.mscale_all_dim * math.log(config.factor) + 1) ** 2
    keys, values, rows = [], [], []
    for t, x in enumerate(x_TD):
        query = (w["q_up_proj.weight"] @ rms(w["q_down_proj.weight"] @ x, w["q_norm.weight"])) if "q_norm.weight" in w else None
        query = w["q_proj.weight"] @ x if query is None else query
        down = w["kv_down_proj.weight"] @ x
        up = (w["kv_up_proj.weight"] @ rms(down[:K], w["kv_norm.weight"])).view(H, N + V)
        k_rope = rope_of_paper(down[K:], t, config)
        keys.append([torch.cat([up[h, :N], k_rope]) for h in range(H)])
        values.append([up[h, N:] for h in range(H)])
        heads = []
        for h in range(H):
            q = query.view(H, N + R)[h]
            q = torch.cat([q[:N], rope_of_paper(q[N:], t, config)])
            a = torch.stack([q @ keys[s][h] * scale for s in range(t + 1)]).softmax(0)
            heads.append(sum(a[s] * values[s][h] for s in range(t + 1)))
        rows.append(w["o_proj.weight"] @ torch.cat(heads))
    return torch.stack(rows)


ROPES = {
    "halves": RopeConfig(),
    "pairs": RopeConfig(interleaved=True),
    "yarn": YARN,
    "yarn pairs": RopeConfig(**(vars(YARN) | {"interleaved": True})),
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("q_lora_rank", [None, Q])
def test_equals_the_papers_equations(q_lora_rank, rope) -> None:
    layer = build(q_lora_rank, ROPES[rope])
    x_TD = torch.randn(19, D)
    y = layer(x_TD[None], context(layer, torch.zeros(1, 19, dtype=torch.long)))
    torch.testing.assert_close(y[0].double(), mla_of_paper(layer, x_TD.double(), ROPES[rope]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 1, 4, 1]])
def test_absorbed_decoding_equals_training(rope, chunks) -> None:
    layer, x = build(Q, ROPES[rope]), torch.randn(2, 12, D)
    y = layer(x, context(layer, torch.zeros(2, 12, dtype=torch.long)))
    cache, parts = LayerCache(), []
    with torch.no_grad():
        for part in x.split(chunks, dim=1):
            ctx = context(layer, torch.zeros(part.shape[:2], dtype=torch.long), start=cache.length)
            parts.append(layer(part, ctx, cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), y, rtol=1e-5, atol=1e-5)


def test_cache_holds_the_latent_and_one_rotary_key() -> None:
    layer, cache = build(Q, RopeConfig()), LayerCache()
    x = torch.randn(1, 5, D)
    layer(x, context(layer, torch.zeros(1, 5, dtype=torch.long)), cache)
    (past,) = cache.append(torch.zeros(1, 1, K + R))
    assert past.shape == (1, 6, K + R)
    deepseek_v3 = AttentionConfig(kind="mla", num_heads=128, kv_lora_rank=512, qk_rope_head_dim=64)
    config = ModelConfig(num_layers=61, attention=deepseek_v3)
    assert cache_scalars_per_token(config, layer=0) == 576
    assert cache_scalars_per_token(config) == 61 * 576


def test_packed_documents_have_the_outputs_and_gradients_of_documents_alone() -> None:
    layer = build(Q, RopeConfig(interleaved=True))
    lengths = [3, 9, 1, 7]
    ids_BT = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    x, weight = torch.randn(1, 20, D, requires_grad=True), torch.randn(1, 20, D)
    packed = layer(x, context(layer, ids_BT))
    parameters = [x, *layer.parameters()]
    packed_grads = torch.autograd.grad((packed * weight).sum(), parameters)
    alone = [layer(part, context(layer, torch.zeros(part.shape[:2], dtype=torch.long))) for part in x.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(packed_grads, torch.autograd.grad((torch.cat(alone, dim=1) * weight).sum(), parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ids", [[[PADDING] * 6], [[0, 0, 1, 1, PADDING, PADDING]], [[PADDING, PADDING, 0, 0, 0, PADDING]]])
def test_padding_makes_no_nan_and_reaches_no_token(ids) -> None:
    layer, ids_BT = build(None, RopeConfig()), torch.tensor(ids)
    x = torch.randn(1, 6, D)
    valid = ids_BT != PADDING
    y = layer(x, context(layer, ids_BT))
    changed = layer(torch.where(valid[..., None], x, 100.0), context(layer, ids_BT))
    assert y.isfinite().all()
    torch.testing.assert_close(changed[valid], y[valid])
    y[valid].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
