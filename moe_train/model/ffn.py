"""The dense feed-forward network: SwiGLU (arXiv:2002.05202) and its clamped form (gpt-oss). Also the shared expert of a MoE layer.

Shapes: D hidden, F inner width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from moe_train.config import ModelConfig


def gated_activation(gate: Tensor, up: Tensor, kind: str, limit: float, alpha: float) -> Tensor:
    """swiglu: silu(gate) · up.  swiglu_clamped: g = min(gate, limit), u = clamp(up, ±limit), (u + 1) · g · sigmoid(alpha · g)."""
    if kind == "swiglu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()


class DenseFFN(nn.Module):
    """down( act(gate(x), up(x)) ). x [..., D] -> [..., D]. `gate_up_proj` stacks gate (first F rows) and up (last F rows)."""

    def __init__(self, config: ModelConfig, hidden_size: int) -> None:
        super().__init__()
        self.kind, self.limit, self.alpha = config.activation, config.swiglu_limit, config.swiglu_alpha
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gated_activation(gate, up, self.kind, self.limit, self.alpha))
