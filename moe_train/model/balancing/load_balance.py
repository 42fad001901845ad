"""The load-balancing losses: one product f · P, three places to count f.

All three are  L = Σ_i f_i P_i  with  f_i = E/(K·T) · #{choices of expert i}  and  P_i = mean over tokens of the router's probability for i,
so that balanced routing gives exactly 1. f carries no gradient. They differ in the tokens over which f and P are counted:

- micro-batch (GShard arXiv:2006.16668, Switch arXiv:2101.03961 eq. 4-6): the micro-batch;
- sequence-wise (DeepSeek-V3 arXiv:2412.19437 eq. 17-20): each row by itself, rows weighted by their tokens; f counts the K best scores
  of each token, without selection bias and groups, where the others count what was chosen;
- global-batch (Qwen arXiv:2501.11873): f over the whole batch of the optimizer step, P over the micro-batch.

Shapes: B sequences, T tokens, N = B·T, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def micro_batch_loss(probs_NE: Tensor, load_E: Tensor, valid_N: Tensor | None) -> Tensor:
    """Scalar. load_E counts the valid tokens of this micro-batch."""
    return global_batch_loss(probs_NE, load_E, valid_N)


def global_batch_loss(probs_NE: Tensor, load_E: Tensor, valid_N: Tensor | None) -> Tensor:
    """Scalar. load_E [E] counts the choices of every token of the global batch (of this micro-batch alone: the micro-batch loss)."""
    num_experts = probs_NE.shape[-1]
    f_E = load_E.to(probs_NE.dtype) * (num_experts / load_E.sum().clamp(min=1))
    return (f_E * masked_mean(probs_NE, valid_N, dim=0)).sum()


def sequence_loss(probs_BTE: Tensor, ids_BTK: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Scalar: Σ_rows (tokens of the row / tokens of the micro-batch) · Σ_i f_i P_i."""
    num_experts, num_choices = probs_BTE.shape[-1], ids_BTK.shape[-1]
    ones_BTK = torch.ones_like(ids_BTK, dtype=probs_BTE.dtype)
    if valid_BT is not None:
        ones_BTK = ones_BTK * valid_BT.unsqueeze(-1)
    counts_BE = torch.zeros(probs_BTE.shape[0], num_experts, dtype=probs_BTE.dtype, device=probs_BTE.device)
    counts_BE.scatter_add_(1, ids_BTK.flatten(1), ones_BTK.flatten(1))
    tokens_B = counts_BE.sum(-1) / num_choices
    f_BE = counts_BE * (num_experts / (num_choices * tokens_B.clamp(min=1))).unsqueeze(-1)
    loss_B = (f_BE * masked_mean(probs_BTE, valid_BT, dim=1)).sum(-1)
    return (loss_B * tokens_B).sum() / tokens_B.sum().clamp(min=1)


def masked_mean(values: Tensor, valid: Tensor | None, dim: int) -> Tensor:
    """Mean over `dim` of the entries that are valid (padding never counts)."""
    if valid is None:
        return values.mean(dim)
    return (values * valid.unsqueeze(-1)).sum(dim) / valid.sum(dim).clamp(min=1).unsqueeze(-1)
