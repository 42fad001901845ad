"""QK-clip: the logits of a clipped head shrink by exactly γ, those of every other head do not move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_train.config import AttentionConfig, ConfigError, ModelConfig, MoEConfig
from moe_train.model.transformer import Transformer
from moe_train.optim import check_qk_clip, qk_clip


def build(attention: AttentionConfig) -> Transformer:
    model = Transformer(ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, attention=attention, moe=MoEConfig(4, 2, 16)))
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            nn.init.normal_(parameter)
    return model


def mla(q_lora: int | None) -> AttentionConfig:
    return AttentionConfig(
        kind="mla", num_heads=4, q_lora_rank=q_lora, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )


def gqa(num_kv_heads: int, bias: bool = True) -> AttentionConfig:
    return AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=num_kv_heads, head_dim=8, qkv_bias=bias)


def logits_and_values(module: nn.Module, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """q·k without rotation (which is linear and acts within a head) [H, T, T], and the values, from the weights alone."""
    a = module.config
    if a.kind == "mla":
        q = module.q_up_proj(module.q_norm(module.q_down_proj(x_TD))) if a.q_lora_rank else module.q_proj(x_TD)
        q_THX = q.unflatten(-1, (4, -1))
        latent, k_rope = module.kv_down_proj(x_TD).split([16, 4], dim=-1)
        k_nope, v = module.kv_up_proj(module.kv_norm(latent)).unflatten(-1, (4, -1)).split([8, 8], dim=-1)
        k_THX = torch.cat([k_nope, k_rope[:, None].expand(-1, 4, -1)], dim=-1)
    else:
        q_THX, k, v = (y.unflatten(-1, (-1, 8)) for y in (module.q_proj(x_TD), module.k_proj(x_TD), module.v_proj(x_TD)))
        k_THX = k.repeat_interleave(4 // a.num_kv_heads, 1)
    return torch.einsum("thx,shx->hts", q_THX, k_THX), v


@pytest.mark.parametrize(
    "attention", [mla(16), mla(None), gqa(4), gqa(2), gqa(1, bias=False)], ids=["mla", "mla-full-q", "mha", "gqa", "mqa"]
)
@torch.no_grad()
def test_logits_scale_by_gamma_per_head(attention: AttentionConfig) -> None:
    model, x_TD = build(attention), torch.randn(5, 32)
    modules = [block.attention for block in model.blocks]
    before = [logits_and_values(module, x_TD) for module in modules]
    qk_max = {0: torch.tensor([50.0, 100.0, 200.0, 1000.0]), 1: torch.full((4,), 3.0)}
    clipped = qk_clip(model, {name: p.data for name, p in model.named_parameters()}, qk_max, tau=100.0)
    after = [logits_and_values(module, x_TD) for module in modules]
    assert clipped == 2
    gamma_H = torch.tensor([1.0, 1.0, 0.5, 0.1])[:, None, None]
    torch.testing.assert_close(after[0][0], before[0][0] * gamma_H, rtol=1e-5, atol=1e-6)
    assert torch.equal(after[0][1], before[0][1]), "values must not change"
    assert torch.equal(after[1][0], before[1][0]), "a layer below tau must not change"


def test_mla_leaves_the_shared_rotary_key_alone() -> None:
    model = build(mla(16))
    weight = model.blocks[0].attention.kv_down_proj.weight
    before = weight.detach().clone()
    qk_clip(model, {name: p.data for name, p in model.named_parameters()}, {0: torch.full((4,), 400.0)}, tau=100.0)
    assert torch.equal(weight, before)


def test_qk_norm_is_refused_with_the_way_out() -> None:
    config = ModelConfig(attention=AttentionConfig(kind="gqa", qk_norm="per_head"))
    with pytest.raises(ConfigError, match=r"muonclip has no effect with model\.attention\.qk_norm=per_head.*optim\.name=muon"):
        check_qk_clip(config, 100.0)
    with pytest.raises(ConfigError, match="qk_clip_tau=0"):
        check_qk_clip(ModelConfig(), 0)
