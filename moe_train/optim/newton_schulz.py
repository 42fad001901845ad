"""Orthogonalisation by a quintic Newton-Schulz iteration (Muon, kellerjordan.github.io/posts/muon), batched over equal matrices.

X ← M / ‖M‖_F; repeat: A = X Xᵀ, X ← a·X + (b·A + c·A²) X. Singular values end in about [0.7, 1.2].
Shapes: S matrices, R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def newton_schulz(matrices_SRC: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Nearest semi-orthogonal matrices (roughly), [S, R, C] in `dtype`. Zero stays zero."""
    a, b, c = COEFFICIENTS
    x = matrices_SRC.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
