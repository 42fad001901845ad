"""All experts in one grouped matmul, which takes the rows as they are. The way on a GPU; on a CPU its backward is many times slower.

A grouped matmul leaves the rows past the last group unwritten, forward and backward; so nothing here reads such a row: the elementwise
steps between the matmuls keep rows apart, and sums over rows (biases) leave them out.

Shapes: R rows sorted by expert, D hidden, E experts, F expert width, G = 2F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_train.model.ffn import activate
from moe_train.model.moe.kernels.weights import ExpertWeights


def grouped_is_available() -> bool:
    return hasattr(torch.nn.functional, "grouped_mm") or hasattr(torch, "_grouped_mm")


def _grouped_mm(rows: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return mm(rows, weight, offs=ends_E)


def grouped_ffn(rows_RD: Tensor, counts_E: Tensor, scale_R: Tensor, weights: ExpertWeights) -> Tensor:
    """rows [R, D] with counts[e] rows of expert e in turn, each times scale [R] -> [R, D]. Needs no count on the host. Rows past the last
    expert's hold no value."""
    ends_E = counts_E.cumsum(0).to(torch.int32)
    biased = weights.gate_up_bias_EG is not None or weights.down_bias_ED is not None
    # Rows past the last expert's point at an extra bias row, whose gradient nobody takes.
    expert_R = (
        torch.searchsorted(ends_E, torch.arange(rows_RD.shape[0], device=rows_RD.device, dtype=torch.int32), right=True) if biased else None
    )
    hidden_RG = _add_bias(_grouped_mm(rows_RD, weights.gate_up_EGD.mT, ends_E), weights.gate_up_bias_EG, expert_R)
    value_RF = activate(hidden_RG, weights.activation) * scale_R[:, None]
    out_RD = _grouped_mm(value_RF, weights.down_EDF.mT, ends_E)
    return _add_bias(out_RD, weights.down_bias_ED, expert_R, scale_R)


def _add_bias(rows: Tensor, bias: Tensor | None, expert_R: Tensor | None, scale_R: Tensor | None = None) -> Tensor:
    if bias is None or expert_R is None:
        return rows
    bias_R = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[expert_R]
    return rows + (bias_R if scale_R is None else bias_R * scale_R[:, None])
