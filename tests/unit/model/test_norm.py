"""RMSNorm against its formula in fp64."""

from __future__ import annotations

import pytest
import torch

from moe_train.model.norm import RMSNorm


def plain(x, weight, eps) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("shape", [(3, 5, 32), (2, 4, 3, 8), (7, 16), (0, 16)])
@pytest.mark.parametrize("trained", [True, False])
def test_equals_formula_with_all_gradients(shape, trained) -> None:
    norm = RMSNorm(shape[-1], 1e-5)
    torch.nn.init.normal_(norm.weight)
    norm.weight.requires_grad_(trained)
    x = torch.randn(shape, requires_grad=True)
    grad = torch.randn(shape)
    y = norm(x)
    y.backward(grad)
    x64, w64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    y64 = plain(x64, w64, 1e-5)
    y64.backward(grad.double())
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-5)
    if trained:
        torch.testing.assert_close(norm.weight.grad.double(), w64.grad, rtol=1e-5, atol=1e-5)
    else:
        assert norm.weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(norm(x), y)


def test_bf16_errs_no_more_than_plain_pytorch() -> None:
    x = torch.randn(256, 64).bfloat16().requires_grad_()
    norm = RMSNorm(64, 1e-6).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    grad = torch.randn(256, 64).bfloat16()

    def plain_bf16(x, weight):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

    x64, w64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact_y = plain(x64, w64, 1e-6)
    exact = (exact_y, *torch.autograd.grad(exact_y, (x64, w64), grad.double()))
    reference = plain_bf16(x, norm.weight)
    references = (reference, *torch.autograd.grad(reference, (x, norm.weight), grad))
    y = norm(x)
    for ours, theirs, truth in zip((y, *torch.autograd.grad(y, (x, norm.weight), grad)), references, exact, strict=True):
        assert (ours.double() - truth).norm() <= 1.1 * (theirs.double() - truth).norm()
