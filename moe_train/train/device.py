"""Where and how a run computes: device, threads, determinism, compilation."""

from __future__ import annotations

import os

import torch

from moe_train.config import ConfigError, TrainConfig
from moe_train.model.transformer import Block, Transformer
from moe_train.train.allocator import keep_freed_memory


def choose_device(name: str) -> torch.device:
    """auto: the current accelerator, or the CPU where there is none."""
    available = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.device("cpu") if available is None else torch.device(available.type, torch.accelerator.current_device_index())
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device={name} is not a device; use auto, cpu or the name of an accelerator such as cuda.") from None
    if device.type != "cpu" and (available is None or available.type != device.type):
        here = "no accelerator" if available is None else available.type
        raise ConfigError(f"train.device={name} is not here; this machine has {here}. Use train.device=auto.")
    return device


def set_up(config: TrainConfig) -> torch.device:
    """Apply threads and determinism to the process; returns the device."""
    if config.threads is not None:
        if config.threads < 1:
            raise ConfigError(f"train.threads={config.threads} must be at least 1.")
        torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    keep_freed_memory()
    return choose_device(config.device)


def compile_blocks(model: Transformer) -> None:
    """torch.compile, block by block: equal layers share their compiled code, and names in checkpoints do not change."""
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()
