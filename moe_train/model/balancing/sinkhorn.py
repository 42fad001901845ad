"""Sinkhorn selection (S-BASE, arXiv:2202.01169; Megatron-LM): experts are chosen on scores whose rows and columns have been normalised in
turn.

exp(logits) is scaled by row and column factors d0, d1 until every token sums to 1/N and every expert to 1/E. Combine weights still come
from the plain scores. It sees one micro-batch, so its choice depends on the micro-batch size; it is used in training only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sinkhorn(logits_NE: Tensor, iterations: int, valid_N: Tensor | None = None) -> Tensor:
    """Plan [N, E] with rows of sum 1/N and columns of sum 1/E (to the accuracy that `iterations` reach). Padding has no mass."""
    cost_NE = (logits_NE - logits_NE.max()).float().exp()
    if valid_N is not None:
        cost_NE = cost_NE * valid_N.unsqueeze(-1)
    num_tokens = cost_NE.shape[0] if valid_N is None else valid_N.sum().clamp(min=1)
    tiny = torch.finfo(cost_NE.dtype).tiny
    d1_E = torch.ones(cost_NE.shape[1], device=cost_NE.device)
    d0_N = torch.ones(cost_NE.shape[0], device=cost_NE.device)
    for _ in range(iterations):
        d0_N = 1 / (num_tokens * (cost_NE @ d1_E).clamp(min=tiny))
        d1_E = 1 / (cost_NE.shape[1] * (d0_N @ cost_NE).clamp(min=tiny))
    return cost_NE * d0_N.unsqueeze(-1) * d1_E
