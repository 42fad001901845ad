"""fp32, or bf16 for compute with fp32 master weights and fp32 gradient accumulation.

bf16 casts every parameter but those of modules marked `keep_fp32` (the router). The optimizer sees the fp32 masters alone; buffers (the
router's selection bias) are never cast. Gradients of one micro-batch stay in bf16 until the optimizer reads them; of several, each is
added to an fp32 sum as soon as it is whole and then dropped, so that no rounding depends on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_train.optim.chunks import chunks


class Weights:
    """The model's trained parameters as the optimizer sees them.

    dtype: what the matrices compute in. parameters: name -> what the model computes with; master: name -> fp32 tensor the optimizer
    updates (the parameter itself where it is fp32).
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.parameters: dict[str, nn.Parameter] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.master: dict[str, nn.Parameter] = dict(self.parameters)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        full = {name: parameter.data for name, parameter in self.parameters.items()}
        self._summing = False
        # fp32 sums are kept from step to step: fresh memory costs more (page faults) than the addition itself.
        self._sums: dict[str, Tensor] = {}
        self._begun: set[str] = set()
        for name in cast(model, precision):
            parameter = self.parameters[name]
            # The masters keep what the cast has rounded away.
            self.master[name] = nn.Parameter(full[name])
            parameter.register_post_accumulate_grad_hook(self._adder(name, self.master[name]))

    def _adder(self, name: str, master: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if not self._summing or parameter.grad is None:
                return
            if name not in self._sums:
                self._sums[name] = torch.empty_like(master)
            if name in self._begun:
                for total, part in chunks(self._sums[name], parameter.grad):
                    total.add_(part)
            else:
                self._sums[name].copy_(parameter.grad)
                self._begun.add(name)
            parameter.grad = None

        return add

    @property
    def low(self) -> dict[str, nn.Parameter]:
        """The parameters that have a separate master."""
        return {name: p for name, p in self.parameters.items() if self.master[name] is not p}

    def begin(self, num_micro_batches: int) -> None:
        """Forget the gradients of the last step; sum in fp32 when there will be more than one micro-batch."""
        self._summing = num_micro_batches > 1
        self._begun.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """name -> gradient, fp32, or bf16 after one micro-batch. A parameter that no token reached has a gradient of zeros."""
        found = {}
        for name, parameter in self.parameters.items():
            gradient = self._sums[name] if name in self._begun else parameter.grad
            found[name] = torch.zeros_like(parameter) if gradient is None else gradient
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that compute."""
        for name, parameter in self.low.items():
            parameter.copy_(self.master[name])


def cast(model: nn.Module, precision: str) -> list[str]:
    """Cast the parameters that compute in bf16; returns their names (none for fp32)."""
    if precision != "bf16":
        return []
    kept: set[str] = set()
    for prefix, module in model.named_modules():
        if getattr(module, "keep_fp32", False):
            kept.update(f"{prefix}.{name}" for name, _ in module.named_parameters())
    names = [name for name, _ in model.named_parameters() if name not in kept]
    for name in names:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.to(torch.bfloat16)
    return names
