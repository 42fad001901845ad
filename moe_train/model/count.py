"""How many parameters a model has, part by part, in all and active for one token. From the meta device: nothing is allocated.

Active parameters are those that one token passes through: everything but the routed experts it does not visit (embedding and
head included, as the published numbers do).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_train.config import ModelConfig
from moe_train.model.transformer import Transformer

PARTS = ("embedding", "attention", "dense_ffn", "router", "routed_experts", "shared_experts", "norms", "head", "mtp")


@dataclass
class ParameterCount:
    """total and active parameters; by_part and active_by_part with the keys of PARTS; selection_bias: entries of the router's bias buffers
    that the published model carries (not parameters)."""

    total: int
    active: int
    by_part: dict[str, int]
    active_by_part: dict[str, int]
    selection_bias: int
    active_matrices: int
    """Active parameters that multiply a token: matrices of attention, FFN, router and MTP; no norm, bias, sink, embedding or head."""


def part_of(name: str) -> str:
    """The part a parameter belongs to."""
    pieces = name.split(".")
    if pieces[0] in ("embedding", "head", "mtp"):
        return pieces[0]
    if "attention" in pieces:
        return "norms" if pieces[-2].endswith("norm") else "attention"
    for part, key in (("router", "router"), ("routed_experts", "experts"), ("shared_experts", "shared"), ("dense_ffn", "ffn")):
        if key in pieces:
            return part
    return "norms"


def meta_model(config: ModelConfig) -> Transformer:
    """The model without memory."""
    with torch.device("meta"):
        return Transformer(config)


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts of the model this config describes; a tied head counts once, as the embedding."""
    by_part = dict.fromkeys(PARTS, 0)
    active = dict.fromkeys(PARTS, 0)
    matrices = 0
    for name, parameter in meta_model(config).named_parameters():
        part, size = part_of(name), parameter.numel()
        by_part[part] += size
        routed = ".experts." in name
        visited = size * config.moe.top_k // config.moe.num_experts if routed else size
        active[part] += visited
        if part not in ("embedding", "head") and parameter.dim() >= 2 and "bias" not in name:
            matrices += visited
    moe_layers = config.ffn_kinds().count("moe")
    bias = moe_layers * config.moe.num_experts if config.moe.router.selection_bias else 0
    return ParameterCount(sum(by_part.values()), sum(active.values()), by_part, active, bias, matrices)
