"""Quantile balancing (Kimi K3, arXiv:2607.24653; background kexue.fm/archives/11619).

Token i takes expert j when s_ij + b_j exceeds its cutoff α_i, the (K+1)-th largest biased score; so r_ij = α_i − s_ij is the bias that j
would need. Setting b_j to the (K/E)-quantile of r_{:,j} over the global batch gives every expert its share: the exact coordinate minimiser
of the dual of balanced assignment (DeepSeek's sign rule is sign descent on the same dual). The quantile is read from a histogram of `bins`
equal bins over [b_min − 1, b_max + 1] (scores lie in [0, 1]), integers that add up over micro-batches and ranks; the error is at most a
bin's width.

Shapes: N tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bounds(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Range of required biases: low, high (scalars)."""
    return bias_E.min() - 1, bias_E.max() + 1


def histogram(scores_NE: Tensor, bias_E: Tensor, top_k: int, bins: int, valid_N: Tensor | None) -> Tensor:
    """int64 [E, bins] counts of the required biases of the valid tokens."""
    num_experts = scores_NE.shape[-1]
    if valid_N is not None:
        scores_NE = scores_NE[valid_N]
    cutoff_N1 = (scores_NE + bias_E).topk(min(top_k + 1, num_experts), dim=-1).values[:, -1:]
    low, high = bounds(bias_E)
    bin_NE = ((cutoff_N1 - scores_NE - low) * (bins / (high - low))).long().clamp_(0, bins - 1)
    bin_NE += torch.arange(num_experts, device=bin_NE.device) * bins
    return torch.bincount(bin_NE.flatten(), minlength=num_experts * bins).view(num_experts, bins)


def quantile_update(bias_E: Tensor, histogram_EH: Tensor, top_k: int) -> Tensor:
    """New bias, fp32 [E]: the (K/E)-quantile of each row by linear interpolation inside its bin, minus the mean over experts."""
    num_experts, bins = histogram_EH.shape
    low, high = bounds(bias_E.double())
    width = (high - low) / bins
    cumulative_EH = histogram_EH.cumsum(-1).double()
    target_E1 = cumulative_EH[:, -1:] * (top_k / num_experts)
    index_E1 = torch.searchsorted(cumulative_EH, target_E1).clamp(max=bins - 1)
    inside_E1 = histogram_EH.gather(-1, index_E1).double()
    before_E1 = cumulative_EH.gather(-1, index_E1) - inside_E1
    position_E = (index_E1 + (target_E1 - before_E1) / inside_E1.clamp(min=1)).squeeze(-1)
    quantile_E = low + width * position_E
    return (quantile_E - quantile_E.mean()).to(bias_E.dtype)
