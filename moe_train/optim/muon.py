"""Muon (kellerjordan.github.io/posts/muon) as in Moonlight (arXiv:2502.16982 eq. 4), over logical matrices:

    M ← μ·M + G,  U = NewtonSchulz(G + μ·M) (Nesterov) or NewtonSchulz(M),  θ ← θ − lr·λ·θ − lr · 0.2·√max(R, C) · U

so that the update has about the root mean square of AdamW's and both share one learning rate. Equal shapes of all layers go through one
batched iteration. torch.optim.Muon takes 2-D parameters only, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_train.optim.chunks import chunks
from moe_train.optim.matrices import Split
from moe_train.optim.newton_schulz import newton_schulz

BATCH_ELEMENTS = 1 << 22
"""Elements orthogonalised at once; bounds the scratch memory (a few times this)."""


class Muon:
    """parameters: name -> fp32 tensor, updated in place; splits: name -> its logical matrices."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        splits: Mapping[str, Split],
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        steps: int,
        rms_scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """dtype: what the iteration computes in, the precision of the model (two to four times faster in bf16, but rounding there would
        turn differences of 1e-7 between layouts into 1e-3 of an update)."""
        self.dtype = dtype
        self.parameters, self.splits = dict(parameters), dict(splits)
        self.lr, self.weight_decay, self.mu, self.nesterov, self.steps, self.rms_scale = (
            lr,
            weight_decay,
            momentum,
            nesterov,
            steps,
            rms_scale,
        )
        self.momentum = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr_factor: float, scale: float) -> None:
        """One update with gradients × scale (the clip factor) at the rate lr × lr_factor."""
        lr = self.lr * lr_factor
        for name, buffer in self.momentum.items():
            for part, gradient in chunks(buffer, gradients[name]):
                part.mul_(self.mu).add_(gradient, alpha=scale)
        for batch in self._batches(gradients):
            moved = torch.cat([self._direction(momentum, gradient, scale) for _, momentum, gradient in batch])
            update = newton_schulz(moved, self.steps, self.dtype)
            size = self.rms_scale * math.sqrt(max(update.shape[-2:]))
            for (parameter, _, _), part in zip(batch, update.split([len(parameter) for parameter, _, _ in batch]), strict=True):
                parameter.mul_(1 - lr * self.weight_decay).add_(part.to(parameter.dtype), alpha=-lr * size)

    def _direction(self, momentum: Tensor, gradient: Tensor, scale: float) -> Tensor:
        direction = momentum.to(self.dtype)
        return direction.mul(self.mu).add_(gradient.to(self.dtype), alpha=scale) if self.nesterov else direction

    def _batches(self, gradients: Mapping[str, Tensor]) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
        """Views (parameter, momentum, gradient) [S, R, C] of one shape (R, C), at most about BATCH_ELEMENTS at once."""
        pending: dict[tuple[int, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for name, split in self.splits.items():
            views = (split.parts(t) for t in (self.parameters[name], self.momentum[name], gradients[name]))
            for row in zip(*views, strict=True):
                rows = max(1, BATCH_ELEMENTS // row[0][0].numel())
                for piece in zip(*(view.split(rows) for view in row), strict=True):
                    key = piece[0].shape[1:]
                    waiting = pending.setdefault(key, [])
                    if waiting and sum(part.numel() for part, _, _ in waiting) + piece[0].numel() > BATCH_ELEMENTS:
                        yield pending.pop(key)
                        waiting = pending.setdefault(key, [])
                    waiting.append(piece)
        yield from pending.values()

    def state(self) -> dict[str, Tensor]:
        return {f"momentum/{name}": tensor for name, tensor in self.momentum.items()}
