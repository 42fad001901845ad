"""Balancing without an auxiliary loss (DeepSeek, arXiv:2408.15664 algorithm 1): b_i ← b_i + u · sign(mean load − load_i), once a step."""

from __future__ import annotations

from torch import Tensor


def sign_update(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """New bias, fp32 [E]. load_E: int64 counts of the whole global batch (floats would lose counts above 2²⁴)."""
    # num_experts · load against the total keeps the comparison in integers: a tie is a tie.
    difference_E = load_E.sum() - load_E * load_E.numel()
    return bias_E + rate * difference_E.sign().to(bias_E.dtype)
