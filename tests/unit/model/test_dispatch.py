"""Dispatch and combine against the plain sum over choices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_train.config import MoEConfig
from moe_train.model.moe.dispatch import LocalDispatcher

HIDDEN = 8


def choices(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    if num_tokens == 0:
        return torch.zeros(0, top_k, dtype=torch.long)
    return torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])


def scale_rows(rows: Tensor, counts: Tensor, weights_R: Tensor, factor_E: Tensor) -> Tensor:
    """A stand-in for experts whose result is easy to know: expert e multiplies its rows by their weights and factor[e]. Rows of nobody
    become NaN."""
    factors = torch.full((rows.shape[0],), float("nan"), dtype=rows.dtype)
    factors[: int(counts.sum())] = factor_E.repeat_interleave(counts)
    return rows * (weights_R * factors)[:, None]


def check(num_tokens: int, num_experts: int, top_k: int, config: MoEConfig, keep: Tensor | None, ids: Tensor | None = None) -> None:
    dispatcher = LocalDispatcher(config)
    ids = choices(num_tokens, num_experts, top_k) if ids is None else ids
    x = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    weights = torch.rand(num_tokens, top_k, requires_grad=True)
    factor = torch.randn(num_experts, requires_grad=True)
    rows, weights_R, plan = dispatcher.dispatch(x, ids, weights, keep)
    # Each row is the token it says, each kept choice has one row, and padding weighs nothing.
    assert int(plan.counts_E.sum()) <= rows.shape[0]
    used = plan.token_of_row_R < num_tokens
    assert torch.equal(rows[used], x[plan.token_of_row_R[used]])
    assert not weights_R[~used].any()
    y = dispatcher.combine(scale_rows(rows, plan.counts_E, weights_R, factor), plan)
    kept = torch.ones_like(weights) if keep is None else keep.to(weights.dtype)
    true_y = ((weights * kept * factor[ids]).sum(1, keepdim=True)) * x
    torch.testing.assert_close(y, true_y)
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, weights, factor), grad, retain_graph=True)
    truth = torch.autograd.grad(true_y, (x, weights, factor), grad)
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def moe(num_experts: int, top_k: int, **fields: object) -> MoEConfig:
    return MoEConfig(num_experts=num_experts, top_k=top_k, expert_hidden_size=4, **fields)


@given(num_tokens=st.integers(0, 40), num_experts=st.integers(1, 9), data=st.data())
def test_equals_the_weighted_sum(num_tokens: int, num_experts: int, data: st.DataObject) -> None:
    torch.manual_seed(0)
    top_k = data.draw(st.integers(1, num_experts))
    keep = torch.rand(num_tokens, top_k) < data.draw(st.sampled_from([0.0, 0.5, 1.0])) if data.draw(st.booleans()) else None
    backend = data.draw(st.sampled_from(["loop", "batched"]))
    check(num_tokens, num_experts, top_k, moe(num_experts, top_k, backend=backend), keep)


@pytest.mark.parametrize("expert", [0, 3])
def test_all_tokens_to_one_expert(expert: int) -> None:
    check(50, 4, 1, moe(4, 1), None, torch.full((50, 1), expert))


def test_padding_makes_every_expert_a_multiple_of_16_and_adds_nothing_to_empty_ones() -> None:
    ids = torch.tensor([[0], [0], [2]])
    *_, plan = LocalDispatcher(moe(4, 1)).dispatch(torch.randn(3, HIDDEN), ids, torch.ones(3, 1))
    assert plan.counts_E.tolist() == [16, 0, 16, 0]


def test_pad_to_capacity_gives_every_expert_the_same_rows() -> None:
    config = moe(4, 2, capacity_factor=1.5, pad_to_capacity=True)
    keep = torch.rand(10, 2) < 0.5
    *_, plan = LocalDispatcher(config).dispatch(torch.randn(10, HIDDEN), choices(10, 4, 2), torch.ones(10, 2), keep)
    assert plan.counts_E.tolist() == [8, 8, 8, 8]  # ceil(1.5 · 10 · 2 / 4)
    check(10, 4, 2, config, keep)


def test_bf16_sums_in_fp32() -> None:
    dispatcher, num_tokens = LocalDispatcher(moe(16, 8)), 64
    x, ids, weights = torch.randn(num_tokens, HIDDEN).bfloat16(), choices(num_tokens, 16, 8), torch.rand(num_tokens, 8)
    rows, weights_R, plan = dispatcher.dispatch(x, ids, weights)
    rows = rows * weights_R[:, None]
    y = dispatcher.combine(rows, plan)
    exact = rows.double()[plan.row_of_choice_NK].sum(1)
    # One rounding of the result, not one for each of the eight terms.
    assert float((y.double() - exact).abs().max() / exact.abs().max()) < 2**-8


def test_frozen_weights_and_frozen_input() -> None:
    dispatcher, ids = LocalDispatcher(moe(4, 2)), choices(10, 4, 2)
    for needs_x, needs_weights in ((True, False), (False, True)):
        x, weights = torch.randn(10, HIDDEN, requires_grad=needs_x), torch.rand(10, 2, requires_grad=needs_weights)
        rows, weights_R, plan = dispatcher.dispatch(x, ids, weights)
        dispatcher.combine(rows * weights_R[:, None], plan).sum().backward()
        assert (x.grad is not None) == needs_x
        assert (weights.grad is not None) == needs_weights
