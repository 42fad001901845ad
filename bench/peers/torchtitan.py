"""torchtitan's Qwen3 and DeepSeek-V3 models on one process, with PyTorch's fused attention (its own choice for a CPU is slower).

Its experts compute in bf16 whatever the model's precision, so there is no fp32 figure of it to compare with.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.peers.serve import Loss, main
from bench.shapes import Shape


def config_of(shape: Shape) -> object:
    """A model config of torchtitan's registry style."""
    from torchtitan.models import deepseek_v3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm

    if shape.q_lora_rank is None:
        rope = CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=4096, theta=1e6)
        layers = qwen3._build_qwen3_moe_layers(
            n_layers=shape.layers,
            dim=shape.hidden,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            moe_hidden_dim=shape.expert_ffn,
            num_experts=shape.experts,
            top_k=shape.top_k,
            attn_backend="flex",
            moe_comm_backend="standard",
            rope=rope,
        )
        model, norm, init = qwen3.Qwen3Model, qwen3._qwen3_norm(shape.hidden), qwen3._LINEAR_INIT
        embedding_init = qwen3._EMBEDDING_INIT
    else:
        rope = ComplexRoPE.Config(dim=shape.rope_dim, max_seq_len=4096, theta=10000.0)
        layers = deepseek_v3._build_dsv3_layers(
            n_layers=shape.layers,
            n_dense_layers=shape.first_dense,
            dim=shape.hidden,
            n_heads=shape.heads,
            q_lora_rank=shape.q_lora_rank,
            kv_lora_rank=shape.kv_lora_rank,
            qk_nope_head_dim=shape.nope_dim,
            qk_rope_head_dim=shape.rope_dim,
            v_head_dim=shape.value_dim,
            mscale=1.0,
            dense_hidden_dim=shape.dense_ffn,
            moe_hidden_dim=shape.expert_ffn,
            num_experts=shape.experts,
            num_shared_experts=shape.shared_experts,
            router_top_k=shape.top_k,
            router_score_func="sigmoid",
            router_route_norm=True,
            attn_backend="flex",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=rope,
        )
        norm = RMSNorm.Config(normalized_shape=shape.hidden, param_init=deepseek_v3._NORM_INIT)
        model, init, embedding_init = deepseek_v3.DeepSeekV3Model, deepseek_v3._LINEAR_INIT, deepseek_v3._EMBEDDING_INIT
    return model.Config(
        vocab_size=shape.vocab,
        dim=shape.hidden,
        norm=norm,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab, embedding_dim=shape.hidden, param_init=embedding_init),
        lm_head=Linear.Config(in_features=shape.hidden, out_features=shape.vocab, param_init=init),
        layers=layers,
    )


def build(shape: Shape, dtype: torch.dtype, variant: str, compiled: bool) -> tuple[nn.Module, Loss]:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = config_of(shape)
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.train()
    if compiled:
        for layer in model.layers.values():
            layer.compile()
    positions_BT = torch.arange(shape.sequence).expand(shape.micro_batch, -1)

    def loss_of(tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        logits = model(tokens_BT, positions_BT)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels_BT.flatten())

    return model, loss_of


if __name__ == "__main__":
    main(build)
