"""The ways of an accelerator: FlexAttention's block mask and the sinks' correction without its compiler (with it where an accelerator is at
hand), and fused attention for what is left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from moe_train.model.attention.attend import attend_on_accelerator
from moe_train.model.attention.blocked import attend_in_blocks
from moe_train.model.attention.flex import attend_flex, block_mask, flex_is_available
from moe_train.model.attention.mask import AttentionMask, visible_after

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def documents(kind: str, num_tokens: int) -> Tensor:
    return {
        "one": torch.zeros(2, num_tokens, dtype=torch.long),
        "packed": (torch.rand(2, num_tokens) < 0.02).long().cumsum(1),
        "short": (torch.rand(2, num_tokens) < 0.3).long().cumsum(1),
    }[kind]


@pytest.mark.parametrize("kind", ["one", "packed", "short"])
@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize("num_tokens", [16, 100, 257])
def test_block_mask_is_that_of_the_dense_mask(kind, window, num_tokens) -> None:
    ids = documents(kind, num_tokens)
    visible = AttentionMask(ids, window).visible(window)
    ours, dense = block_mask(visible, 16), visible.dense(num_tokens)
    batch = visible.first_BT.shape[0]
    theirs = create_block_mask(lambda b, h, q, kv: dense[b, 0, q, kv], batch, None, num_tokens, num_tokens, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(ours.to_dense().bool(), theirs.to_dense().bool()), "the same blocks are visited"
    index = torch.arange(num_tokens)
    for b in range(batch):
        pairs = ours.mask_mod(torch.tensor(b), torch.tensor(0), index[:, None], index[None, :])
        assert torch.equal(pairs, dense[b, 0])
    full = torch.zeros_like(ours.to_dense(), dtype=torch.bool)
    for b in range(batch):
        for i in range(full.shape[2]):
            full[b, 0, i, ours.full_kv_indices[b, 0, i, : ours.full_kv_num_blocks[b, 0, i]].long()] = True
    whole = (
        torch.nn.functional.pad(dense, (0, -num_tokens % 16, 0, -num_tokens % 16), value=True).unflatten(3, (-1, 16)).unflatten(2, (-1, 16))
    )
    assert not (full & ~whole.all(5).all(3)).any(), "a block without a mask is wholly visible"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["one", "packed"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_blocked_attention(kind, window, with_sinks) -> None:
    q, k, v = (torch.randn(2, heads, 150, width) for heads, width in ((4, 16), (2, 16), (2, 8)))
    sinks = torch.randn(4) if with_sinks else None
    visible = AttentionMask(documents(kind, 150), window).visible(window)
    ours = attend_flex(q, k, v, visible, 0.3, sinks, attention=flex_attention)
    torch.testing.assert_close(ours, attend_in_blocks(q, k, v, visible, 0.3, sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["one", "packed"])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_queries", [50, 1, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_without_flex_attention_the_numbers_stay(kind, window, num_queries, with_sinks) -> None:
    """An accelerator that Triton does not know, and queries behind a cache on any."""
    q, k, v = torch.randn(2, 4, num_queries, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 8)
    sinks = torch.randn(4) if with_sinks else None
    trained = AttentionMask(documents(kind, 50), window).visible(window)
    visible = trained if num_queries == 50 else visible_after(num_queries, 50, window, q.device)
    ours = attend_on_accelerator(q, k, v, visible, 0.3, sinks)
    torch.testing.assert_close(ours, attend_in_blocks(q, k, v, visible, 0.3, sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(ACCELERATOR is None or not flex_is_available(ACCELERATOR.type), reason="needs an accelerator that Triton compiles for")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_compiled_on_an_accelerator_with_gradients(window, with_sinks) -> None:
    shapes = ((4, 64), (2, 64), (2, 32))
    tensors = [torch.randn(2, heads, 500, width) for heads, width in shapes] + ([torch.randn(4)] if with_sinks else [])
    ids = documents("packed", 500)
    results = []
    for device in (torch.device("cpu"), ACCELERATOR):
        there = [x.detach().to(device).requires_grad_() for x in tensors]
        visible = AttentionMask(ids.to(device), window).visible(window)
        attend = attend_in_blocks if device.type == "cpu" else attend_flex
        y = attend(*there[:3], visible, 0.1, *there[3:])
        results.append([y, *torch.autograd.grad(y.square().sum(), there)])
    for cpu, accelerated in zip(*results, strict=True):
        torch.testing.assert_close(accelerated.cpu(), cpu, rtol=5e-3, atol=5e-3)
