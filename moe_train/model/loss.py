"""Summed next-token cross-entropy. The caller divides by the token count of the global batch (law: one denominator)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moe_train.model.batch import IGNORE


def cross_entropy_sum(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Σ over labelled tokens of −log softmax(hidden · weightᵀ)[label], fp32 scalar."""
    logits_NV = F.linear(hidden_ND, weight_VD).float()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, reduction="sum")
