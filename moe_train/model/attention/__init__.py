"""Attention kinds by their name in the config."""

from __future__ import annotations

from torch import nn

from moe_train.config import ModelConfig
from moe_train.model.attention.cache import LayerCache, cache_scalars_per_token
from moe_train.model.attention.gqa import GroupedQueryAttention
from moe_train.model.attention.mask import AttentionMask
from moe_train.model.attention.mla import MultiHeadLatentAttention
from moe_train.model.attention.rope import Rotation, rotation

ATTENTION = {"mla": MultiHeadLatentAttention, "gqa": GroupedQueryAttention}


def build_attention(config: ModelConfig, layer: int) -> nn.Module:
    return ATTENTION[config.attention.kind](config, layer)


__all__ = [
    "ATTENTION",
    "AttentionMask",
    "GroupedQueryAttention",
    "LayerCache",
    "MultiHeadLatentAttention",
    "Rotation",
    "build_attention",
    "cache_scalars_per_token",
    "rotation",
]
