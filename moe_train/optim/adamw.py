"""AdamW (arXiv:1711.05101) on fp32 masters by PyTorch's fused kernel, reading fp32 or bf16 gradients.

    m ← β1·m + (1 − β1)·g,  v ← β2·v + (1 − β2)·g²,  θ ← θ − lr·λ·θ − lr · m̂ / (√v̂ + ε)

torch.optim.AdamW would need every gradient in fp32 at once; here a bf16 gradient is widened piece by piece in front of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from moe_train.optim.chunks import chunks


class AdamW:
    """parameters: name -> fp32 tensor, updated in place. `decayed` names those that weight decay acts on."""

    def __init__(
        self, parameters: Mapping[str, Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decayed: set[str]
    ) -> None:
        self.parameters = dict(parameters)
        self.lr, self.betas, self.eps, self.weight_decay, self.decayed = lr, betas, eps, weight_decay, decayed
        self.exp_avg = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.updates = 0
        """Updates done (skipped steps do not count); the t of the bias correction."""

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr_factor: float, scale: float) -> None:
        """One update with gradients × scale (the clip factor) at the rate lr × lr_factor."""
        wide = [name for name in self.parameters if gradients[name].dtype == torch.float32]
        for decay in (True, False):
            self._update(
                [(name, *self._tensors(name, gradients[name])) for name in wide if (name in self.decayed) == decay], decay, lr_factor, scale
            )
        for name in self.parameters:
            if gradients[name].dtype != torch.float32:
                m, v = self.exp_avg[name].view(-1), self.exp_avg_sq[name].view(-1)
                start = 0
                for part, gradient in chunks(self.parameters[name], gradients[name]):
                    stop = start + part.numel()
                    self._update([(name, part, gradient, m[start:stop], v[start:stop])], name in self.decayed, lr_factor, scale)
                    start = stop
        self.updates += 1

    def _tensors(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.parameters[name], gradient, self.exp_avg[name], self.exp_avg_sq[name]

    def _update(self, rows: list[tuple[str, Tensor, Tensor, Tensor, Tensor]], decay: bool, lr_factor: float, scale: float) -> None:
        if not rows:
            return
        _, parameters, gradients, m, v = (list(column) for column in zip(*rows, strict=True))
        device = parameters[0].device
        adamw(
            parameters,
            gradients,
            m,
            v,
            [],
            [torch.tensor(float(self.updates), device=device) for _ in rows],
            fused=True,
            # The kernel divides by grad_scale while it reads, which saves a pass over the gradients.
            grad_scale=None if scale == 1.0 else torch.tensor(1.0 / scale, device=device),
            found_inf=None if scale == 1.0 else torch.zeros((), device=device),
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr * lr_factor,
            weight_decay=self.weight_decay if decay else 0.0,
            eps=self.eps,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps beside `updates`: the live moments by `kind/parameter name`."""
        moments = {f"exp_avg/{name}": tensor for name, tensor in self.exp_avg.items()}
        return moments | {f"exp_avg_sq/{name}": tensor for name, tensor in self.exp_avg_sq.items()}
