"""The dense feed-forward network: SwiGLU (arXiv:2002.05202) and its clamped form (gpt-oss). Also the shared expert of a MoE layer.

Shapes: D hidden, F inner width, R rows; hidden_RG holds gate in its first F columns and up in its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from moe_train.config import ModelConfig
from moe_train.model.linear import Linear


@dataclass(frozen=True)
class Activation:
    """swiglu: silu(gate) · up.  swiglu_clamped: g = min(gate, limit), u = clamp(up, ±limit), (u + 1) · g · sigmoid(alpha · g)."""

    kind: str = "swiglu"
    limit: float = 7.0
    alpha: float = 1.702

    @staticmethod
    def of(config: ModelConfig) -> Activation:
        return Activation(config.activation, config.swiglu_limit, config.swiglu_alpha)

    def __call__(self, hidden_RG: Tensor) -> Tensor:
        """hidden [..., 2F] -> [..., F] by plain operations with their own backward."""
        gate, up = hidden_RG.chunk(2, dim=-1)
        if self.kind == "swiglu":
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * (self.alpha * gate).sigmoid()

    def forward_out(self, hidden_RG: Tensor, out_RF: Tensor) -> Tensor:
        """The same values written to `out_RF`, without autograd and with as few passes over memory as there are."""
        if self.kind != "swiglu":
            return out_RF.copy_(self(hidden_RG))
        gate, up = hidden_RG.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=out_RF)
        return out_RF.mul_(up)

    def backward_out(self, hidden_RG: Tensor, grad_RF: Tensor, grad_hidden_RG: Tensor) -> None:
        """Write d(hidden) to `grad_hidden_RG`. Overwrites `grad_RF`.

        d(up) = grad · silu(gate); d(gate) = grad · up · σ(gate) · (1 + gate · (1 − σ(gate))); clamped values pass no gradient.
        """
        gate, up = hidden_RG.chunk(2, dim=-1)
        grad_gate, grad_up = grad_hidden_RG.chunk(2, dim=-1)
        if self.kind == "swiglu":
            self._swiglu_backward(F.silu(gate), gate, up, grad_RF, grad_gate, grad_up)
            return
        g, u = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        sigmoid = (self.alpha * g).sigmoid()
        value = g * sigmoid
        torch.mul(grad_RF, value, out=grad_up).masked_fill_(up.abs() > self.limit, 0)
        slope = sigmoid + self.alpha * value * (1 - sigmoid)
        torch.mul(grad_RF.mul_(u.add_(1)), slope, out=grad_gate).masked_fill_(gate > self.limit, 0)

    def weighted_backward_out(
        self, hidden_RG: Tensor, grad_RF: Tensor, grad_hidden_RG: Tensor, weights_R1: Tensor, value_RF: Tensor, grad_weights_R1: Tensor
    ) -> None:
        """`backward_out` for y = w · act(hidden) with one weight a row, given d(y) in `grad_RF`; writes w · act(hidden) to `value_RF` and
        d(w) to `grad_weights_R1`."""
        if self.kind == "swiglu":
            gate, up = hidden_RG.chunk(2, dim=-1)
            silu = F.silu(gate)
            torch.mul(silu, up, out=value_RF)
        else:
            self.forward_out(hidden_RG, value_RF)
        torch.sum(grad_RF * value_RF, -1, keepdim=True, out=grad_weights_R1)
        grad_RF.mul_(weights_R1)
        value_RF.mul_(weights_R1)
        if self.kind == "swiglu":
            self._swiglu_backward(silu, gate, up, grad_RF, *grad_hidden_RG.chunk(2, dim=-1))
        else:
            self.backward_out(hidden_RG, grad_RF, grad_hidden_RG)

    @staticmethod
    def _swiglu_backward(silu: Tensor, gate: Tensor, up: Tensor, grad_RF: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
        torch.mul(grad_RF, silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_RF.mul_(up), gate, grad_input=grad_gate)


class _ActivationFunction(torch.autograd.Function):
    """Activation with the backward above: it keeps `hidden` alone, where plain autograd keeps four tensors."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.activation = activation  # type: ignore[attr-defined]
        return activation.forward_out(hidden, hidden.new_empty(*hidden.shape[:-1], hidden.shape[-1] // 2))

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_hidden = torch.empty_like(hidden)
        ctx.activation.backward_out(hidden, grad.clone(), grad_hidden)  # type: ignore[attr-defined]
        return grad_hidden, None


def activate(hidden: Tensor, activation: Activation) -> Tensor:
    """hidden [..., 2F] -> [..., F]. A compiler fuses the plain form by itself."""
    if torch.compiler.is_compiling() or not hidden.requires_grad:
        return activation(hidden)
    return _ActivationFunction.apply(hidden, activation)


class DenseFFN(nn.Module):
    """down( act(gate(x), up(x)) ). x [..., D] -> [..., D]. `gate_up_proj` stacks gate (first F rows) and up (last F rows)."""

    def __init__(self, config: ModelConfig, hidden_size: int) -> None:
        super().__init__()
        self.activation = Activation.of(config)
        self.gate_up_proj = Linear(config.hidden_size, 2 * hidden_size, bias=False)
        self.down_proj = Linear(hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(activate(self.gate_up_proj(x), self.activation))
