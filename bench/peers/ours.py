"""This project's model, set up as the Trainer sets it up."""

from __future__ import annotations

import torch
from torch import nn

from bench.peers.serve import Loss, main
from bench.shapes import Shape
from moe_train.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig, RouterConfig
from moe_train.model.batch import Batch, Denominators
from moe_train.model.transformer import Transformer
from moe_train.train.allocator import keep_freed_memory
from moe_train.train.device import compile_blocks


def config_of(shape: Shape, backend: str = "auto") -> ModelConfig:
    """The shape in this project's terms."""
    if shape.q_lora_rank is None:
        attention = AttentionConfig("gqa", shape.heads, shape.kv_heads, shape.head_dim, qk_norm="per_head", rope=RopeConfig(theta=1e6))
        router = RouterConfig("softmax")
    else:
        attention = AttentionConfig(
            "mla",
            shape.heads,
            q_lora_rank=shape.q_lora_rank,
            kv_lora_rank=shape.kv_lora_rank,
            qk_nope_head_dim=shape.nope_dim,
            qk_rope_head_dim=shape.rope_dim,
            v_head_dim=shape.value_dim,
            rope=RopeConfig(interleaved=True),
        )
        router = RouterConfig("sigmoid")
    moe = MoEConfig(shape.experts, shape.top_k, shape.expert_ffn, shape.shared_experts, backend=backend, router=router)
    return ModelConfig(
        shape.name, shape.vocab, shape.hidden, shape.layers, shape.dense_ffn, shape.first_dense, attention=attention, moe=moe
    )


def build(shape: Shape, dtype: torch.dtype, variant: str, compiled: bool) -> tuple[nn.Module, Loss]:
    """variant: an experts back end ("" = auto)."""
    keep_freed_memory()
    model = Transformer(config_of(shape, variant or "auto"))
    model.init_weights(0)
    model.to(dtype).train()
    if compiled:
        compile_blocks(model)
    documents_BT = torch.zeros(shape.micro_batch, shape.sequence, dtype=torch.long)
    denominators = Denominators(shape.tokens, shape.tokens)

    def loss_of(tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return model(Batch(tokens_BT, labels_BT, documents_BT), denominators).loss

    return model, loss_of


if __name__ == "__main__":
    main(build)
