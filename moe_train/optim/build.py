"""Which parameter goes to which optimizer, and which of them decay.

Muon takes matrices: attention, dense and expert projections, MTP's projection. AdamW takes the rest: embeddings, head, router, norms,
biases, sinks. Weight decay acts on every matrix (embeddings and router too) and on no norm, bias or sink, unless `optim.decay_all` is
set (OLMoE's recipe).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_train.config import OptimConfig
from moe_train.optim.adamw import AdamW
from moe_train.optim.matrices import Split, split_of
from moe_train.optim.muon import Muon


class Optimizer:
    """AdamW, or Muon and AdamW, as one."""

    def __init__(self, adamw: AdamW, muon: Muon | None) -> None:
        self.adamw, self.muon = adamw, muon

    def step(self, gradients: Mapping[str, Tensor], lr_factor: float, scale: float) -> None:
        """One update of the masters with gradients × scale. gradients: name -> fp32 or bf16."""
        if self.muon is not None:
            self.muon.step(gradients, lr_factor, scale)
        self.adamw.step(gradients, lr_factor, scale)

    @property
    def lr(self) -> float:
        """Peak rate that the log quotes (Muon's where there is one)."""
        return self.adamw.lr if self.muon is None else self.muon.lr

    @property
    def updates(self) -> int:
        return self.adamw.updates

    @updates.setter
    def updates(self, value: int) -> None:
        self.adamw.updates = value

    def state(self) -> dict[str, Tensor]:
        """Live moments by `kind/parameter name`; a checkpoint keeps them and `updates`."""
        return self.adamw.state() | (self.muon.state() if self.muon is not None else {})


def is_decayed(name: str, tensor: Tensor) -> bool:
    """Matrices decay; norms, biases (also [E, F] stacks of them) and sinks do not."""
    return tensor.ndim >= 2 and not name.endswith("bias")


def is_muon(name: str, tensor: Tensor) -> bool:
    parts = name.split(".")
    return is_decayed(name, tensor) and parts[0] not in ("embedding", "head") and "router" not in parts


def build_optimizer(model: nn.Module, master: Mapping[str, Tensor], config: OptimConfig, dtype: torch.dtype = torch.float32) -> Optimizer:
    """master: name -> fp32 tensor for each trained parameter of `model`; dtype: what Muon's iteration computes in."""
    muon_names = {name for name, tensor in master.items() if config.name != "adamw" and is_muon(name, tensor)}
    rest = {name: tensor for name, tensor in master.items() if name not in muon_names}
    adamw = AdamW(
        rest,
        lr=config.lr if config.name == "adamw" or config.adamw_lr is None else config.adamw_lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        decayed={name for name, tensor in rest.items() if config.decay_all or is_decayed(name, tensor)},
    )
    if config.name == "adamw":
        return Optimizer(adamw, None)
    matrices = {name: master[name] for name in master if name in muon_names}
    muon = Muon(
        matrices,
        _splits(model, matrices, config.muon_per_head),
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        steps=config.muon_steps,
        rms_scale=config.muon_rms_scale,
        dtype=dtype,
    )
    return Optimizer(adamw, muon)


def _splits(model: nn.Module, matrices: Mapping[str, torch.Tensor], per_head: bool) -> dict[str, Split]:
    splits = {}
    for name, tensor in matrices.items():
        owner, _, inner = name.rpartition("attention.")
        module = model.get_submodule(f"{owner}attention") if owner else None
        splits[name] = split_of(tensor, name, module, inner, per_head)
    return splits
