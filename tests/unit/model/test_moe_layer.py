"""The whole MoE layer against its plain formula: dropped choices and padding add nothing, kept ones add weight · expert.

Shapes: B rows, T tokens, N = B·T, K choices a token, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_train.config import BalanceConfig, ModelConfig, MoEConfig
from moe_train.model.attention import AttentionMask
from moe_train.model.batch import ForwardContext
from moe_train.model.moe import MoE
from moe_train.model.moe.router import expert_capacity

D, E, K = 16, 6, 3
B, T = 3, 11


def layer(**moe: object) -> MoE:
    module = MoE(ModelConfig(hidden_size=D, moe=MoEConfig(E, K, 8, num_shared_experts=1, **moe)), BalanceConfig(), 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator).mul_(0.5)
    return module


def context(valid: Tensor | None) -> ForwardContext:
    zeros = torch.zeros(B, T, dtype=torch.int64)
    return ForwardContext(positions_BT=zeros, mask=AttentionMask(zeros), valid_BT=valid)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


def plain(module: MoE, x: Tensor, ids: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    """Token by token, choice by choice."""
    rows = []
    for n, token in enumerate(x.flatten(0, 1)):
        y = swiglu(token, module.shared.gate_up_proj.weight, module.shared.down_proj.weight)
        for k in range(K):
            if keep[n, k]:
                e = int(ids[n, k])
                y = y + weights[n, k] * swiglu(token, module.experts.gate_up_proj[e], module.experts.down_proj[e])
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("backend", ["loop", "batched", "grouped"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity_factor": 0.6}, {"capacity_factor": 0.6, "drop_policy": "position"}, {"capacity_factor": 0.6, "pad_to_capacity": True}],
    ids=["dropless", "by score", "by position", "padded to capacity"],
)
def test_output_and_gradients_equal_the_plain_sum_over_kept_choices(backend: str, padded: bool, options: dict) -> None:
    module = layer(backend=backend, **options)
    valid = torch.ones(B, T, dtype=torch.bool)
    if padded:
        valid[1, 4:] = False
    x = torch.randn(B, T, D, requires_grad=True)
    ctx = context(valid if padded else None)
    routing = module.router(x, ctx)
    keep = torch.ones(B * T, K, dtype=torch.bool) if routing.keep_NK is None else routing.keep_NK
    if options:
        capacity = expert_capacity(int(valid.sum()), K, E, 0.6)
        assert torch.bincount(routing.expert_ids_NK[keep], minlength=E).max() == capacity
        assert int(keep.sum()) < int(valid.sum()) * K
    assert not keep[~valid.flatten()].any()
    y, truth = module(x, ctx), plain(module, x, routing.expert_ids_NK, routing.weights_NK, keep)
    torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5)
    inputs = {"x": x} | dict(module.named_parameters())
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, list(inputs.values()), grad)
    expected = torch.autograd.grad(truth, list(inputs.values()), grad)
    for name, mine, true in zip(inputs, ours, expected, strict=True):
        assert float((mine - true).norm() / true.norm()) < 1e-5, name
