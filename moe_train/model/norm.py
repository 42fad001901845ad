"""RMSNorm (arXiv:1910.07467): x / sqrt(mean(x²) + eps) · weight, computed in fp32.

With n = x · rstd, rstd = 1 / sqrt(mean(x²) + eps) and upstream gradient g:
d(weight) = Σ_rows g ∘ n;  dx = rstd · (g ∘ weight − n · mean(g ∘ weight ∘ n)).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x [..., D] -> [..., D] in the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _normalise(x, self.eps)[0] * self.weight  # a compiler fuses the plain form and derives its own backward
        return _RMSNorm.apply(x, self.weight, self.eps)


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """n in the dtype of x, and rstd [..., 1] in fp32."""
    y = x.float()
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * rstd).to(x.dtype), rstd


class _RMSNorm(torch.autograd.Function):
    """Half the time of plain autograd forward and backward, and it keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normal, rstd = _normalise(x, eps)
        ctx.save_for_backward(x, weight_D, rstd)
        return normal * weight_D

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight_D, rstd = ctx.saved_tensors
        normal = x.float() * rstd
        product = grad.float() * normal
        grad_weight = product.flatten(0, -2).sum(0).to(weight_D.dtype) if ctx.needs_input_grad[1] else None
        mean = (product @ weight_D.float()).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = grad.float() * weight_D.float()
        return grad_x.addcmul_(normal, mean, value=-1).mul_(rstd).to(x.dtype), grad_weight, None
