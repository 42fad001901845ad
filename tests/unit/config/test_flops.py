"""FLOPs from the shapes against PyTorch's own counter on a model that runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_train.config.compose import compose
from moe_train.model import linear
from moe_train.model.batch import Batch
from moe_train.model.flops import attention_flops, flops_per_token, forward_flops_per_token
from moe_train.model.transformer import Transformer

SMOKE = ["+experiment=smoke", "balance=none"]
GQA = ["model.attention={kind:gqa,num_heads:4,num_kv_heads:2,head_dim:16,q_lora_rank:null,kv_lora_rank:0,qk_nope_head_dim:0}"]
GQA += ["model.attention.qk_rope_head_dim=0", "model.attention.v_head_dim=0", "model.mtp.depth=0"]


@pytest.mark.parametrize("overrides", [[], GQA], ids=["mla_mtp", "gqa"])
def test_forward_equals_the_counter(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)  # the counter does not know oneDNN's product
    config = compose([*SMOKE, *overrides]).model
    model = Transformer(config).eval()
    model.init_weights(0)
    tokens = torch.randint(0, config.vocab_size, (1, 64))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the counter does not know the fused kernel of CPUs
        model(Batch.from_tokens(tokens, torch.zeros_like(tokens)))
    # The counter takes attention as a full square; the formula only the visible half of it.
    layers = config.num_layers + config.mtp.depth
    square = sum(attention_flops(config, layer, 64) for layer in range(layers)) * (64 - (64 + 1) / 2) / ((64 + 1) / 2)
    # Experts compute padded rows; a token needs top_k experts of three matrices.
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    padded = sum(flops for name, flops in counts.items() if name.endswith(".experts"))
    moe_layers = config.ffn_kinds().count("moe") + config.mtp.depth
    experts = moe_layers * config.moe.top_k * 3 * 2 * config.hidden_size * config.moe.expert_hidden_size
    counted = (counter.get_total_flops() - padded) / 64 + experts
    assert padded >= 64 * experts
    assert counted == pytest.approx(forward_flops_per_token(config, 64) + square, rel=1e-9)


def test_training_costs_three_forward_passes_and_windows_save() -> None:
    config = compose(["model=gpt_oss_20b"]).model
    assert flops_per_token(config, 4096) == 3 * forward_flops_per_token(config, 4096)
    # Layer 0 has a window of 128, layer 1 none: mean visible keys of one by the other.
    ratio = attention_flops(config, 1, 4096) / attention_flops(config, 0, 4096)
    visible = sum(min(position, 128) for position in range(1, 4097)) / 4096
    assert ratio == pytest.approx((4097 / 2) / visible)
