"""Hugging Face transformers. variant: the experts implementation (eager, batched_mm, grouped_mm)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.peers.serve import Loss, main
from bench.shapes import Shape


def config_of(shape: Shape) -> object:
    """Qwen3-MoE, DeepSeek-V3 or, without experts, Qwen3."""
    from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    if not shape.experts:
        return Qwen3Config(**common, head_dim=shape.head_dim, intermediate_size=shape.dense_ffn)
    if shape.q_lora_rank is None:
        return Qwen3MoeConfig(
            **common,
            head_dim=shape.head_dim,
            intermediate_size=shape.expert_ffn,
            moe_intermediate_size=shape.expert_ffn,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            norm_topk_prob=True,
            output_router_logits=False,
        )
    return DeepseekV3Config(
        **common,
        intermediate_size=shape.dense_ffn,
        moe_intermediate_size=shape.expert_ffn,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        n_shared_experts=shape.shared_experts,
        first_k_dense_replace=shape.first_dense,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.nope_dim,
        qk_rope_head_dim=shape.rope_dim,
        v_head_dim=shape.value_dim,
        num_mtp_layers=0,
    )


def build(shape: Shape, dtype: torch.dtype, variant: str, compiled: bool) -> tuple[nn.Module, Loss]:
    from transformers import AutoModelForCausalLM

    extra = {"experts_implementation": variant or "grouped_mm"} if shape.experts else {}
    model = AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa", dtype=dtype, **extra).train()
    if compiled:
        model.compile()

    def loss_of(tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens_BT).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels_BT.flatten())

    return model, loss_of


if __name__ == "__main__":
    main(build)
