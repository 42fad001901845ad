"""Blocked attention against softmax attention in fp64, with every mask that the model makes, with sinks and behind a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_train.model.attention import blocked
from moe_train.model.attention.attend import attend
from moe_train.model.attention.mask import AttentionMask, visible_after


def plain(q, k, v, allowed, scale, sinks=None) -> Tensor:
    """softmax(scale · q kᵀ) v over the allowed keys and the sink, which carries no value."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    logits = (q @ k.mT * scale).masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None, None].expand(*logits.shape[:-1], 1)], dim=-1)
    return logits.softmax(-1)[..., : k.shape[2]] @ v


def allowed_pairs(ids, window) -> Tensor:
    """bool [B, 1, T, T], from the definition: same document, not later, within the window."""
    distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    near = distance < (window or ids.shape[1])
    return ((ids[:, :, None] == ids[:, None, :]) & (distance >= 0) & near).unsqueeze(1)


def inputs(heads, groups, num_tokens, width, value_width, dtype=torch.float32) -> list[Tensor]:
    # [B, T, H, C] turned to [B, H, T, C], as the projections give them.
    shapes = [(2, num_tokens, heads, width), (2, num_tokens, groups, width), (2, num_tokens, groups, value_width)]
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def documents(kind, num_tokens) -> Tensor:
    if kind == "one":
        return torch.zeros(2, num_tokens, dtype=torch.long)
    return (torch.rand(2, num_tokens) < 0.05).long().cumsum(1)


SHAPES = [(4, 2, 150, 8, 8), (2, 2, 200, 12, 8), (4, 1, 64, 8, 4), (2, 2, 1, 4, 4)]


@pytest.mark.parametrize("kind", ["one", "packed", "packed, rows apart"])
@pytest.mark.parametrize("window", [None, 1, 5, 70, 1000])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("heads", "groups", "num_tokens", "width", "value_width"), SHAPES)
def test_equals_softmax_attention_with_all_gradients(
    monkeypatch, kind, window, with_sinks, heads, groups, num_tokens, width, value_width
) -> None:
    if kind == "packed, rows apart":
        monkeypatch.setattr(blocked, "ROWS_APART", 1)
    tensors = inputs(heads, groups, num_tokens, width, value_width)
    if with_sinks:
        tensors.append(torch.randn(heads, requires_grad=True))
    ids, scale = documents(kind, num_tokens), 0.3
    visible = AttentionMask(ids, window).visible(window)
    allowed = allowed_pairs(ids, window)
    assert torch.equal(visible.dense(num_tokens).expand_as(allowed), allowed)
    out = attend(*tensors[:3], visible, scale, *tensors[3:])
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad)
    exact_inputs = [x.detach().double().requires_grad_() for x in tensors]
    exact = plain(*exact_inputs[:3], allowed, scale, *exact_inputs[3:])
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    for ours, truth in zip(grads, torch.autograd.grad(exact, exact_inputs, grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(attend(*tensors[:3], visible, scale, *tensors[3:]), out), "evaluation sees the numbers of training"


@pytest.mark.parametrize("num_queries", [1, 3, 70])
@pytest.mark.parametrize("window", [None, 4, 90])
def test_queries_behind_a_cache_see_the_past(num_queries, window) -> None:
    q, k, v = inputs(4, 2, 100, 8, 8)
    q = q[:, :, -num_queries:]
    allowed = allowed_pairs(torch.zeros(1, 100, dtype=torch.long), window)[:, :, -num_queries:]
    out = attend(q, k, v, visible_after(num_queries, 100, window, q.device), 0.3)
    torch.testing.assert_close(out, plain(q, k, v, allowed, 0.3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_bf16_errs_no_more_than_plain_softmax_attention(with_sinks) -> None:
    tensors = inputs(4, 2, 256, 32, 32, torch.bfloat16)
    if with_sinks:
        tensors.append(torch.randn(4).bfloat16().requires_grad_())
    ids = documents("packed", 256)
    allowed, visible = allowed_pairs(ids, None), AttentionMask(ids).visible()
    grad = torch.randn(2, 4, 256, 32).bfloat16()
    exact_inputs = [x.detach().double().requires_grad_() for x in tensors]
    exact = plain(*exact_inputs[:3], allowed, 0.2, *exact_inputs[3:])
    exact_grads = torch.autograd.grad(exact, exact_inputs, grad.double())
    theirs = plain(*tensors[:3], allowed, 0.2, *tensors[3:])
    their_grads = torch.autograd.grad(theirs, tensors, grad)
    ours = attend(*tensors[:3], visible, 0.2, *tensors[3:])
    our_grads = torch.autograd.grad(ours, tensors, grad)
    for mine, other, truth in zip((ours, *our_grads), (theirs, *their_grads), (exact, *exact_grads), strict=True):
        assert (mine.double() - truth).norm() <= 1.2 * (other.double() - truth).norm()


def test_blocks_skip_the_keys_of_other_documents() -> None:
    ids = torch.cat([torch.zeros(1, 1000), torch.ones(1, 1048)], dim=1).long()
    met = sum(
        (block.last - block.first) * (block.end - block.start) for block in blocked.blocks_of(AttentionMask(ids).visible(), 1, 2048, 64)
    )
    assert met < 0.6 * sum((t // 64 + 1) * 64 for t in range(2048))
