"""megatron-core on one CPU process (see megatron_cpu.py)."""

from __future__ import annotations

import os

import torch
from torch import nn

from bench.peers.serve import Loss, main
from bench.shapes import Shape


def _config(shape: Shape, dtype: torch.dtype) -> object:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    common = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.dense_ffn or shape.expert_ffn,
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_topk": shape.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "softmax" if shape.q_lora_rank is None else "sigmoid",
        "moe_router_pre_softmax": shape.q_lora_rank is None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_layer_freq": [int(layer >= shape.first_dense) for layer in range(shape.layers)],
        "moe_shared_expert_intermediate_size": shape.shared_experts * shape.expert_ffn or None,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "pipeline_dtype": dtype,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "qk_layernorm": True,
    }
    if shape.q_lora_rank is None:
        return TransformerConfig(**common, num_query_groups=shape.kv_heads, kv_channels=shape.head_dim)
    return MLATransformerConfig(
        **common,
        multi_latent_attention=True,
        rope_type="rope",
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_head_dim=shape.nope_dim,
        qk_pos_emb_head_dim=shape.rope_dim,
        v_head_dim=shape.value_dim,
    )


def build(shape: Shape, dtype: torch.dtype, variant: str, compiled: bool) -> tuple[nn.Module, Loss]:
    """variant "" or "unfused": megatron's own attention in place of PyTorch's fused one."""
    if compiled:
        raise SystemExit("megatron-core is not compiled as a whole")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from bench.peers import megatron_cpu

    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = _config(shape, dtype)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if variant != "unfused":
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = (
                megatron_cpu.FusedAttention if shape.q_lora_rank else layer.submodules.self_attention.submodules.core_attention
            )
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(dtype)
    positions_BT = torch.arange(shape.sequence).expand(shape.micro_batch, -1)

    def loss_of(tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return model(tokens_BT, positions_BT, None, labels=labels_BT).mean()

    return model, loss_of


if __name__ == "__main__":
    main(build)
