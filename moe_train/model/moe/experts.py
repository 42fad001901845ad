"""All routed experts of a layer as stacked weights: expert e computes down_e( act(gate_e(x), up_e(x)) ) on its own rows.

Shapes: R rows sorted by expert, D hidden, E experts, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_train.config import ConfigError, ModelConfig
from moe_train.config.errors import require_choice
from moe_train.config.model import EXPERT_BACKENDS
from moe_train.model.ffn import Activation
from moe_train.model.moe.kernels import ExpertWeights, batched_ffn, grouped_ffn, loop_ffn
from moe_train.model.moe.kernels.grouped import grouped_is_available


def choose_backend(backend: str, device_type: str) -> str:
    """`auto`: grouped on a GPU, loop on a CPU; any other name is the user's choice.

    By measurement (bench/records): on a CPU the loop led the others at every shape, precision and skew that was tried, so there is
    nothing to decide by shape; padding to the fullest expert pays its skew in full, and grouped matmul's backward on a CPU is slow. The
    rule looks at no clock, so that a resumed run takes the same path as the first one.
    """
    if backend != "auto":
        return backend
    return "grouped" if device_type != "cpu" and grouped_is_available() else "loop"


def row_multiple(backend: str) -> int:
    """Rows of each expert are padded (with zeros) to a multiple of this. 16: matmul shapes repeat (loop), and every group starts at an
    address that grouped matmul accepts in every precision."""
    return 1 if backend == "batched" else 16


class Experts(nn.Module):
    """rows [R, D] sorted by expert, their counts [E] and their weights [R] -> weight · expert(row) [R, D].

    gate_up_proj [E, 2F, D]: gate in the first F rows, up in the last; down_proj [E, D, F]; optional biases [E, 2F] and [E, D].
    Rows past sum(counts) belong to nobody: they are never read, and what the output holds there has no meaning.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        require_choice("model.moe.backend", moe.backend, EXPERT_BACKENDS)
        if moe.backend == "grouped" and not grouped_is_available():
            raise ConfigError(f"model.moe.backend=grouped needs a PyTorch with grouped_mm; torch {torch.__version__} has none. Use auto.")
        self.backend, self.activation = moe.backend, Activation.of(config)
        self.gate_up_proj = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.expert_hidden_size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, moe.expert_hidden_size))
        self.gate_up_bias = nn.Parameter(torch.zeros(moe.num_experts, 2 * moe.expert_hidden_size)) if moe.expert_bias else None
        self.down_bias = nn.Parameter(torch.zeros(moe.num_experts, config.hidden_size)) if moe.expert_bias else None

    def forward(self, rows_RD: Tensor, counts_E: Tensor, scale_R: Tensor) -> Tensor:
        """counts_E int64, any numbers >= 0 with sum(counts) <= R; scale_R in the dtype of the rows."""
        weights = ExpertWeights(self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias, self.activation)
        backend = choose_backend(self.backend, rows_RD.device.type)
        if backend == "loop":
            return loop_ffn(rows_RD, counts_E.tolist(), scale_R, weights)
        if backend == "grouped":
            return grouped_ffn(rows_RD, counts_E, scale_R, weights)
        return batched_ffn(rows_RD, counts_E, scale_R, weights)
