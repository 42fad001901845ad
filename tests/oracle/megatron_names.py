"""Our tensors under megatron-core's names and in its layouts, for weights and gradients alike."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from moe_train.config import ModelConfig

RENAMED = [
    (r"^embedding\.", "embedding.word_embeddings."),
    (r"^head\.", "output_layer."),
    (r"^norm\.", "decoder.final_layernorm."),
    (r"^blocks\.", "decoder.layers."),
    (r"^mtp\.(\d+)\.block\.", r"mtp.layers.\1.transformer_layer."),
    (r"^mtp\.(\d+)\.hidden_norm\.", r"mtp.layers.\1.hnorm."),
    (r"^mtp\.(\d+)\.embedding_norm\.", r"mtp.layers.\1.enorm."),
    (r"^mtp\.(\d+)\.projection\.", r"mtp.layers.\1.eh_proj."),
    (r"^mtp\.(\d+)\.norm\.", r"mtp.layers.\1.final_layernorm."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".pre_mlp_layernorm."),
    (r"\.attention\.(q|k|kv)_norm\.", r".self_attention.\1_layernorm."),
    (r"\.attention\.o_proj\.", ".self_attention.linear_proj."),
    (r"\.attention\.(q|q_down|q_up|kv_down|kv_up)_proj\.", r".self_attention.linear_\1_proj."),
    (r"\.ffn\.router\.selection_bias", ".mlp.router.expert_bias"),
    (r"\.ffn\.shared\.", ".mlp.shared_experts."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate_up_proj\.", ".linear_fc1."),
    (r"\.down_proj\.", ".linear_fc2."),
]


def megatron_names(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Experts one by one; the queries, key and value of a group one after the other; the embedding before the hidden state in MTP."""
    tensors, found = dict(tensors), {}
    attention = config.attention
    if attention.kind == "gqa":
        for name in [name for name in tensors if name.endswith("attention.q_proj.weight")]:
            q, k, v = (tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj"))
            groups = [part.unflatten(0, (attention.num_kv_heads, -1)) for part in (q, k, v)]
            found[name.replace("attention.q_proj", "self_attention.linear_qkv")] = torch.cat(groups, dim=1).flatten(0, 1)
    for name, tensor in tensors.items():
        if ".experts." in name:
            part = "linear_fc1" if "gate_up" in name else "linear_fc2"
            prefix = name[: name.index(".experts.")]
            found |= {f"{prefix}.experts.local_experts.{e}.{part}.weight": weight for e, weight in enumerate(tensor)}
        else:
            found[name] = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) if name.endswith("projection.weight") else tensor
    return {_renamed(name): tensor for name, tensor in found.items()}


def _renamed(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
