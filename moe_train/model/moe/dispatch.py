"""Moving tokens to their experts and home again, on one rank: a sort, two gathers.

Shapes: N tokens, K choices a token, R = N·K rows sorted by expert, D hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.config import MoEConfig


@dataclass
class DispatchPlan:
    counts: list[int]
    """Rows of each expert [E]; rows of expert e follow those of e - 1."""
    row_of_choice_NK: Tensor
    """Where choice k of token n lies among the rows; R (one past the end) where it was dropped."""
    token_of_row_R: Tensor


class LocalDispatcher:
    """All experts live here. Dropless unless `capacity_factor` is set."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def dispatch(self, x_ND: Tensor, expert_ids_NK: Tensor, weights_NK: Tensor) -> tuple[Tensor, DispatchPlan]:
        """rows [R, D] ordered by expert, and the plan that `combine` needs."""
        num_choices = expert_ids_NK.shape[1]
        order_R = expert_ids_NK.flatten().argsort(stable=True)
        token_of_row_R = order_R // num_choices
        row_of_choice = torch.empty_like(order_R)
        row_of_choice[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        counts = torch.bincount(expert_ids_NK.flatten(), minlength=self.config.num_experts).tolist()
        plan = DispatchPlan(counts, row_of_choice.view_as(expert_ids_NK), token_of_row_R)
        return x_ND[token_of_row_R], plan

    def combine(self, rows_RD: Tensor, weights_NK: Tensor, plan: DispatchPlan) -> Tensor:
        """y[n] = Σ_k w[n, k] · row of choice (n, k). [N, D]."""
        picked_NKD = rows_RD[plan.row_of_choice_NK]
        return (picked_NKD * weights_NK.to(rows_RD.dtype).unsqueeze(-1)).sum(1)
