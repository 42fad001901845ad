"""Blocked attention against softmax attention in fp64, with every mask that the model makes."""

from __future__ import annotations

import pytest
import torch

from moe_train.model.attention.blocked import attend
from moe_train.model.attention.mask import AttentionMask


def plain(q, k, v, allowed, scale) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return (q @ k.mT * scale).masked_fill(~allowed, float("-inf")).softmax(-1) @ v


def inputs(heads, groups, num_tokens, width, value_width, dtype=torch.float32) -> list[torch.Tensor]:
    # [B, T, H, C] turned to [B, H, T, C], as the projections give them.
    shapes = [(2, num_tokens, heads, width), (2, num_tokens, groups, width), (2, num_tokens, groups, value_width)]
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def documents(kind, num_tokens) -> torch.Tensor:
    if kind == "one":
        return torch.zeros(2, num_tokens, dtype=torch.long)
    cuts = torch.rand(2, num_tokens) < 0.05
    return cuts.long().cumsum(1)


@pytest.mark.parametrize("kind", ["one", "packed"])
@pytest.mark.parametrize("window", [None, 1, 5, 70, 1000])
@pytest.mark.parametrize(
    ("heads", "groups", "num_tokens", "width", "value_width"), [(4, 2, 150, 8, 8), (2, 2, 200, 12, 8), (4, 1, 64, 8, 4), (2, 2, 1, 4, 4)]
)
def test_equals_softmax_attention_with_all_gradients(kind, window, heads, groups, num_tokens, width, value_width) -> None:
    torch.manual_seed(0)
    q, k, v = inputs(heads, groups, num_tokens, width, value_width)
    mask = AttentionMask(documents(kind, num_tokens))
    dense = mask.dense(window)
    allowed = dense if dense is not None else torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    scale = 0.3
    out = attend(q, k, v, dense, scale, window)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = plain(*exact_inputs, allowed, scale)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    for ours, truth in zip(grads, torch.autograd.grad(exact, exact_inputs, grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v, dense, scale, window), out, rtol=1e-5, atol=1e-6)


def test_bf16_errs_no_more_than_plain_softmax_attention() -> None:
    torch.manual_seed(0)
    q, k, v = inputs(4, 2, 256, 32, 32, torch.bfloat16)
    allowed = torch.ones(256, 256, dtype=torch.bool).tril()
    grad = torch.randn(2, 4, 256, 32).bfloat16()
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = plain(*exact_inputs, allowed, 0.2)
    exact_grads = torch.autograd.grad(exact, exact_inputs, grad.double())
    theirs = plain(q, k, v, allowed, 0.2)
    their_grads = torch.autograd.grad(theirs, (q, k, v), grad)
    ours = attend(q, k, v, None, 0.2)
    our_grads = torch.autograd.grad(ours, (q, k, v), grad)
    for mine, other, truth in zip((ours, *our_grads), (theirs, *their_grads), (exact, *exact_grads), strict=True):
        assert (mine.double() - truth).norm() <= 1.2 * (other.double() - truth).norm()
