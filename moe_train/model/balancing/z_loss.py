"""Router z-loss (ST-MoE arXiv:2202.08906 eq. 5): mean over tokens of (log Σ_i exp logit_i)², keeps router logits small."""

from __future__ import annotations

from torch import Tensor


def z_loss(logits_NE: Tensor, valid_N: Tensor | None) -> Tensor:
    """Scalar; the mean over valid tokens."""
    squared_N = logits_NE.logsumexp(-1).square()
    if valid_N is None:
        return squared_N.mean()
    return (squared_N * valid_N).sum() / valid_N.sum().clamp(min=1)
