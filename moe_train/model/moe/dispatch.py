"""Moving tokens to their experts and home again, on one rank: a sort and gathers, in both directions.

The weight of a choice travels with its row and acts inside the expert. The backward passes are gathers too, never scatters: the gradient of
a token is the sum of the K rows it was copied to, and the gradient of a row is that of its token.

Shapes: N tokens, K choices a token, R rows sorted by expert (with padding), D hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_train.config import MoEConfig
from moe_train.model.moe.experts import choose_backend, row_multiple
from moe_train.model.moe.router import expert_capacity


@dataclass
class DispatchPlan:
    counts_E: Tensor
    """int64, rows of each expert, padding rows included; rows of expert e follow those of e - 1."""
    row_of_choice_NK: Tensor
    """Where choice k of token n lies among the rows; the last row, which belongs to nobody, where the choice was dropped."""
    token_of_row_R: Tensor
    """N (one past the end) where the row is padding."""
    spare_row: int | None
    """The row that dropped choices point at, None when nothing can have been dropped."""


class LocalDispatcher:
    """All experts live here. Dropless unless the router says which choices to keep."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def dispatch(
        self, x_ND: Tensor, expert_ids_NK: Tensor, weights_NK: Tensor, keep_NK: Tensor | None = None
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        """rows [R, D] ordered by expert, their weights [R] (0 for padding), and the plan that `combine` needs.

        keep_NK bool: choices that are False go to no expert. Padding rows hold some token's values."""
        plan = self.plan(expert_ids_NK, keep_NK)
        weights_NK = weights_NK.to(x_ND.dtype)
        if keep_NK is not None:
            weights_NK = weights_NK.masked_fill(~keep_NK, 0)
        num_rows = plan.token_of_row_R.shape[0]
        weights_R = weights_NK.new_zeros(num_rows).scatter(0, plan.row_of_choice_NK.flatten(), weights_NK.flatten())
        return _Dispatch.apply(x_ND, plan), weights_R, plan

    def combine(self, rows_RD: Tensor, plan: DispatchPlan) -> Tensor:
        """y[n] = Σ_k row of choice (n, k). [N, D]; a dropped choice adds nothing."""
        return _Combine.apply(rows_RD, plan)

    def plan(self, expert_ids_NK: Tensor, keep_NK: Tensor | None = None) -> DispatchPlan:
        """Where each choice goes. On a GPU nothing here waits for the device: R is an upper bound that follows from the shapes alone."""
        num_tokens, top_k = expert_ids_NK.shape
        num_experts, device = self.config.num_experts, expert_ids_NK.device
        ids = expert_ids_NK.flatten()
        if keep_NK is not None:
            ids = ids.masked_fill(~keep_NK.flatten(), num_experts)  # an expert that does not exist, after all others
        ids_sorted, order = ids.sort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(0, ids, torch.ones_like(ids))
        padded = self._padded(counts[:num_experts], num_tokens)
        starts = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
        # A choice's row: its expert's first row plus its rank among the choices of that expert.
        rank = torch.arange(ids.numel(), device=device) - (counts.cumsum(0) - counts)[ids_sorted]
        num_rows = self._num_rows(starts, num_tokens, top_k)
        row_sorted = starts[ids_sorted] + rank
        if keep_NK is not None:
            row_sorted = torch.where(ids_sorted == num_experts, num_rows, row_sorted)
            num_rows += 1
        row_of_choice = torch.empty_like(order).scatter_(0, order, row_sorted)
        token_of_row = order.new_full((num_rows,), num_tokens).scatter_(0, row_sorted, order // top_k)
        if keep_NK is not None:
            token_of_row[-1] = num_tokens
        return DispatchPlan(padded, row_of_choice.view(num_tokens, top_k), token_of_row, None if keep_NK is None else num_rows - 1)

    def _padded(self, counts_E: Tensor, num_tokens: int) -> Tensor:
        if self.config.pad_to_capacity and self.config.capacity_factor is not None:
            return torch.full_like(counts_E, self._capacity(num_tokens))
        multiple = row_multiple(choose_backend(self.config.backend, counts_E.device.type))
        return (counts_E + multiple - 1) // multiple * multiple

    def _capacity(self, num_tokens: int) -> int:
        return expert_capacity(num_tokens, self.config.top_k, self.config.num_experts, self.config.capacity_factor or 1.0)

    def _num_rows(self, starts: Tensor, num_tokens: int, top_k: int) -> int:
        if starts.device.type == "cpu":
            return int(starts[-1])
        if self.config.pad_to_capacity and self.config.capacity_factor is not None:
            return self._capacity(num_tokens) * self.config.num_experts
        multiple = row_multiple(choose_backend(self.config.backend, starts.device.type))
        return num_tokens * top_k + self.config.num_experts * (multiple - 1)


def _gather_tokens(x_ND: Tensor, plan: DispatchPlan) -> Tensor:
    """x of each row's token; rows of no token hold some token's values."""
    if x_ND.shape[0] == 0:
        return x_ND.new_zeros(plan.token_of_row_R.shape[0], x_ND.shape[1])
    return x_ND.index_select(0, plan.token_of_row_R.clamp(max=x_ND.shape[0] - 1))


def _sum_rows(rows_RD: Tensor, plan: DispatchPlan) -> Tensor:
    """Σ_k row of choice (n, k), without the [N, K, D] copy between. Sums in fp32."""
    num_tokens, top_k = plan.row_of_choice_NK.shape
    if num_tokens == 0:
        return rows_RD.new_zeros(0, rows_RD.shape[1])
    offsets_N = torch.arange(0, num_tokens * top_k, top_k, device=rows_RD.device)
    return torch._embedding_bag_forward_only(
        rows_RD, plan.row_of_choice_NK.flatten(), offsets_N, padding_idx=-1 if plan.spare_row is None else plan.spare_row
    )[0]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return _gather_tokens(x_ND, plan)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad_RD, ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return _sum_rows(rows_RD, plan)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return _gather_tokens(grad_ND.contiguous(), ctx.plan), None
