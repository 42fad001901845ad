"""Compiled blocks equal eager ones, break their graph at the MoE layer alone, and are not compiled again when the routing changes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_train.config import AttentionConfig, ModelConfig, MoEConfig
from moe_train.model.batch import Batch
from moe_train.model.transformer import Block, Transformer


def make(kind: str, recompute_parts: tuple[str, ...]) -> Transformer:
    attention = AttentionConfig(kind, 2, 1, 16, qk_norm="per_head")
    if kind == "mla":
        attention = AttentionConfig(kind, 2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    moe = MoEConfig(num_experts=4, top_k=2, expert_hidden_size=16, num_shared_experts=1)
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=3, ffn_hidden_size=32, first_dense_layers=1, attention=attention, moe=moe
    )
    model = Transformer(config, None, recompute_parts)
    model.init_weights(0)
    return model.train()


@pytest.mark.parametrize("recompute_parts", [(), ("experts",), ("block",)])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_compiled_equals_eager(kind: str, recompute_parts: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    eager, compiled = make(kind, recompute_parts), make(kind, recompute_parts)
    counter = CompileCounterWithBackend("aot_eager")
    for module in compiled.modules():
        if isinstance(module, Block):
            module.compile(backend=counter)
    graphs = 0
    for step in range(4):
        batch = Batch.from_tokens(torch.randint(0, 64, (2, 16)))
        losses = [model(batch).loss for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
        graphs = counter.frame_count if step < 2 else graphs
    for (name, one), two in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert counter.frame_count == graphs
    assert graphs <= 6
    torch._dynamo.reset()
