"""Law: balancing gradients are injected, with an explicit denominator, so that they work under accumulation, recompute and every pipeline
schedule.

A balancing loss is never added to the LM loss (whose logged value stays pure); its gradient enters the graph where the router's weights
leave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = loss.shape, loss.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones(ctx.shape, dtype=ctx.dtype, device=grads[0].device)


def inject(carrier: Tensor, loss: Tensor) -> Tensor:
    """`carrier` unchanged; whoever calls backward through it also adds d(loss)/d(parameters). loss: scalar, already weighted and
    divided."""
    return _Inject.apply(carrier, loss)
