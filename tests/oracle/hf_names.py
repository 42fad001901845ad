"""Tensors of tiny Hugging Face models under our names, for weights and gradients alike."""

from __future__ import annotations

import re

import torch
from torch import Tensor

RENAMED = [
    ("model.embed_tokens.weight", "embedding.weight"),
    ("model.norm.weight", "norm.weight"),
    ("lm_head.weight", "head.weight"),
    (r"model\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.self_attn\.", ".attention."),
    (r"\.q_a_proj\.", ".q_down_proj."),
    (r"\.q_a_layernorm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".q_up_proj."),
    (r"\.kv_a_proj_with_mqa\.", ".kv_down_proj."),
    (r"\.kv_a_layernorm\.", ".kv_norm."),
    (r"\.kv_b_proj\.", ".kv_up_proj."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.mlp\.gate\.e_score_correction_bias", ".ffn.router.selection_bias"),
    (r"\.mlp\.(gate|router)\.bias", ".ffn.router.linear_bias"),
    (r"\.mlp\.(gate|router)\.weight", ".ffn.router.weight"),
    (r"\.mlp\.shared_experts\.", ".ffn.shared."),
    (r"\.mlp\.experts\.gate_up_proj_bias", ".ffn.experts.gate_up_bias"),
    (r"\.mlp\.experts\.down_proj_bias", ".ffn.experts.down_bias"),
    (r"\.mlp\.", ".ffn."),
]


def our_names(tensors: dict[str, Tensor], interleaved_experts: bool = False) -> dict[str, Tensor]:
    """interleaved_experts: gpt-oss stores experts as (in, out) with gate and up columns alternating."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        if interleaved_experts and ".experts." in name:
            tensor = tensor.mT if tensor.ndim == 3 else tensor
            if "gate_up" in name:
                tensor = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
        found[name] = tensor
    for name in [name for name in found if name.endswith(".gate_proj.weight")]:
        up = found.pop(name.replace("gate_proj", "up_proj"))
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([found.pop(name), up])
    return found
