"""Matrix products in fp32 on a CPU go where they are fastest; elsewhere they are PyTorch's own.

PyTorch computes fp32 products by MKL, which takes its AVX2 path on CPUs that are not Intel's; oneDNN (also part of PyTorch) uses AVX-512
there. Measured on an AMD EPYC (Zen 5, 2 cores), 512 × 512 × 512: MKL 216 GFLOP/s, oneDNN 448. The rule depends on the machine and the
shape only, never on a timing, so that a run resumed on the same machine repeats every digit.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST_PRODUCT = 2**22
"""Multiplications below which a product is not worth oneDNN's set-up (about 0.3 ms for a shape not seen before)."""


@torch.compiler.assume_constant_result
def onednn_is_faster() -> bool:
    """fp32 on this CPU: it has AVX-512, is not Intel's, and this PyTorch was built with oneDNN."""
    return _looked_up()


@functools.cache
def _looked_up() -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()


def use_onednn(x: Tensor, num_rows: int, num_inputs: int, num_outputs: int) -> bool:
    """Whether `product` would take oneDNN for this shape."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and num_rows * num_inputs * num_outputs >= SMALLEST_PRODUCT
        and onednn_is_faster()
    )


def product(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """x · weightᵀ [M, O] without autograd; either argument may be a transposed view."""
    if use_onednn(x_MI, x_MI.shape[0], x_MI.shape[1], weight_OI.shape[0]):
        return _onednn(x_MI, weight_OI)
    return torch.mm(x_MI, weight_OI.t())


def product_out(x_MI: Tensor, weight_OI: Tensor, out_MO: Tensor) -> Tensor:
    """`product` written to `out_MO` (contiguous)."""
    if use_onednn(x_MI, x_MI.shape[0], x_MI.shape[1], weight_OI.shape[0]):
        return out_MO.copy_(_onednn(x_MI, weight_OI))
    return torch.mm(x_MI, weight_OI.t(), out=out_MO)


def _onednn(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    return _onednn_compiled(x_MI, weight_OI) if torch.compiler.is_compiling() else _onednn_now(x_MI, weight_OI)


def _onednn_now(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    # A weight with gaps between its rows would take a path without vector instructions, a hundred times slower.
    if not (weight_OI.is_contiguous() or weight_OI.t().is_contiguous()):
        weight_OI = weight_OI.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_MI, weight_OI, None, "none", [], "")


@torch.library.custom_op("moe_train::onednn_product", mutates_args=())
def _onednn_compiled(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """To a compiler the product is one opaque operation: its own lowering of oneDNN's takes constant weights alone."""
    return _onednn_now(x_MI, weight_OI)


@_onednn_compiled.register_fake
def _shape_of_product(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    return x_MI.new_empty(x_MI.shape[0], weight_OI.shape[0])


class _OneDNNLinear(torch.autograd.Function):
    """y = x · weightᵀ; dx = dy · weight; d(weight) = dyᵀ · x."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_MI, weight_OI)
        return product(x_MI, weight_OI)

    @staticmethod
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MI, weight_OI = ctx.saved_tensors
        grad_x = product(grad_MO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        grad_weight = product(grad_MO.t(), x_MI.t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """F.linear, faster for fp32 where `onednn_is_faster`. x [..., I] -> [..., O]."""
    if not use_onednn(x, x.numel() // max(x.shape[-1], 1), weight_OI.shape[1], weight_OI.shape[0]) or weight_OI.dtype != x.dtype:
        return F.linear(x, weight_OI, bias_O)
    y = _OneDNNLinear.apply(x.reshape(-1, x.shape[-1]), weight_OI).view(*x.shape[:-1], -1)
    return y if bias_O is None else y + bias_O


class Linear(nn.Linear):
    """torch.nn.Linear (same parameters, same names) whose product is `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
