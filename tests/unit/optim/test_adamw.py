"""AdamW on masters against torch.optim.AdamW, and the global norm against fp64."""

from __future__ import annotations

import pytest
import torch

from moe_train.optim import global_norm
from moe_train.optim.adamw import AdamW
from moe_train.optim.chunks import CHUNK

SHAPES = {"matrix": (7, 33), "norm": (33,), "large": (3, CHUNK // 2 + 5)}


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_equals_torch_adamw(dtype: torch.dtype, scale: float) -> None:
    start = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    ours = {name: tensor.clone() for name, tensor in start.items()}
    optimizer = AdamW(ours, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decayed={"matrix", "large"})
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    groups = [{"params": [theirs["matrix"], theirs["large"]]}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step, factor in enumerate((1.0, 0.5, 0.25)):
        grads = gradients(step, dtype)
        for name, parameter in theirs.items():
            parameter.grad = grads[name].float() * scale
        for group in reference.param_groups:
            group["lr"] = 0.01 * factor
        reference.step()
        optimizer.step(grads, factor, scale)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.data, rtol=2e-6, atol=2e-6, msg=name)
    assert optimizer.updates == 3


def test_bf16_gradients_are_widened_not_rounded_further() -> None:
    start = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    results = []
    for widen in (False, True):
        values = {name: tensor.clone() for name, tensor in start.items()}
        optimizer = AdamW(values, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decayed=set(values))
        grads = gradients(0, torch.bfloat16)
        optimizer.step({name: g.float() for name, g in grads.items()} if widen else grads, 1.0, 1.0)
        results.append(values)
    for name in SHAPES:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_global_norm_of_many_elements_is_exact(dtype: torch.dtype) -> None:
    """One fp32 accumulator over some ten million elements is off by 1e-3; the law wants every layout to agree to 1e-5."""
    tensors = [torch.randn(3_000_001).to(dtype), torch.randn(5).to(dtype), torch.zeros(4, 4).to(dtype), torch.tensor(2.0).to(dtype)]
    expected = torch.cat([t.double().flatten() for t in tensors]).square().sum().sqrt()
    assert abs(global_norm(tensors).item() / expected.item() - 1) < 1e-6


def test_global_norm_sees_nan_and_inf() -> None:
    assert torch.isnan(global_norm([torch.ones(3), torch.tensor([1.0, float("nan")])]))
    assert torch.isinf(global_norm([torch.ones(3), torch.tensor([1.0, float("inf")], dtype=torch.bfloat16)]))
