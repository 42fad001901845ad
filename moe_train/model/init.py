"""Weight initialisation of the named recipes. Each tensor is drawn from a generator seeded by (seed, its name): the same on every
layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from moe_train.config import ModelConfig

OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "down_proj")


def tensor_seed(seed: int, name: str) -> int:
    """A 63-bit seed for one tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """normal: N(0, std) (DeepSeek 0.006, Qwen3 and Mixtral 0.02); truncated_normal: cut at cutoff·std (OLMoE); depth_scaled: projections
    into the residual stream by std/√(2L) (GPT-2, Megatron). Norm weights 1; biases, attention sinks and every buffer of the router 0."""
    for name, parameter in model.named_parameters():
        if "norm" in name.rsplit(".", 2)[-2] and name.endswith("weight"):
            parameter.fill_(1.0)
        elif name.endswith(("bias", "sinks")):
            parameter.zero_()
        else:
            _draw(parameter, name, config, seed)
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()


def _draw(parameter: Tensor, name: str, config: ModelConfig, seed: int) -> None:
    init = config.init
    std = init.std
    if init.scheme == "depth_scaled" and name.endswith(OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * config.num_layers)
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    value = torch.empty(parameter.shape, dtype=torch.float32)
    if init.scheme == "truncated_normal":
        nn.init.trunc_normal_(value, 0.0, std, -init.cutoff * std, init.cutoff * std, generator=generator)
    else:
        value.normal_(0.0, std, generator=generator)
    parameter.copy_(value)
