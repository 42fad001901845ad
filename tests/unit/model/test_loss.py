"""The chunked cross-entropy against torch's on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from moe_train.model import loss as loss_module
from moe_train.model.batch import IGNORE
from moe_train.model.loss import cross_entropy_sum


def case(num_tokens, dtype=torch.float32, ignored=0.3, hidden=16, vocabulary=50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_ND = torch.randn(num_tokens, hidden).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocabulary, hidden).to(dtype).requires_grad_()
    labels_N = torch.randint(0, vocabulary, (num_tokens,)).masked_fill(torch.rand(num_tokens) < ignored, IGNORE)
    return hidden_ND, weight_VD, labels_N


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 23])
def test_equals_whole_cross_entropy(monkeypatch, num_tokens) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", 8)
    hidden, weight, labels = case(num_tokens)
    loss = cross_entropy_sum(hidden, weight, labels)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss / 7, (hidden, weight))
    h64, w64 = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = F.cross_entropy(h64 @ w64.T, labels, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    for ours, truth in zip(grads, torch.autograd.grad(exact / 7, (h64, w64)), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-6)


def test_no_label_is_zero_loss_and_zero_gradients() -> None:
    hidden, weight, labels = case(9, ignored=2.0)
    loss = cross_entropy_sum(hidden, weight, labels)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_is_frozen_gets_no_gradient(frozen) -> None:
    hidden, weight, labels = case(9)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = cross_entropy_sum(hidden, weight, labels)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="sum"))
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
        assert (hidden.grad is None) == (frozen == "hidden")
        assert (weight.grad is None) == (frozen == "weight")


def test_tied_weight_sums_both_gradients() -> None:
    table = torch.randn(50, 16, requires_grad=True)
    tokens, labels = torch.randint(0, 50, (9,)), torch.randint(0, 50, (9,))
    cross_entropy_sum(F.embedding(tokens, table), table, labels).backward()
    exact = table.detach().clone().requires_grad_()
    F.cross_entropy(F.embedding(tokens, exact) @ exact.T, labels, reduction="sum").backward()
    torch.testing.assert_close(table.grad, exact.grad, rtol=1e-4, atol=1e-5)


def test_unlikely_label_keeps_a_finite_exact_loss() -> None:
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[500.0, 0.0], [-500.0, 0.0]], requires_grad=True)
    loss = cross_entropy_sum(hidden, weight, torch.tensor([1]))
    assert float(loss.detach()) == 1000.0
    loss.backward()
    assert torch.isfinite(hidden.grad).all()


def test_bf16_errs_no_more_than_plain_pytorch(monkeypatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", 32)
    hidden, weight, labels = case(100, torch.bfloat16)
    h64, w64 = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact_loss = F.cross_entropy(h64 @ w64.T, labels, ignore_index=IGNORE, reduction="sum")
    exact = torch.autograd.grad(exact_loss, (h64, w64))
    plain = F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORE, reduction="sum")
    plain_grads = torch.autograd.grad(plain, (hidden, weight))
    ours = cross_entropy_sum(hidden, weight, labels)
    torch.testing.assert_close(ours, plain)
    for mine, theirs, truth in zip(torch.autograd.grad(ours, (hidden, weight)), plain_grads, exact, strict=True):
        assert (mine.double() - truth).norm() <= 1.3 * (theirs.double() - truth).norm()
