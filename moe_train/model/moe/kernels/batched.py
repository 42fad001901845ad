"""All experts in one batched matmul, every expert padded to the fullest one. Worth it when the load is even and the experts are small.

Shapes: E experts, C rows of the fullest expert, R rows, D hidden, G = 2F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_train.model.ffn import activate
from moe_train.model.moe.kernels.weights import ExpertWeights


def batched_ffn(rows_RD: Tensor, counts_E: Tensor, scale_R: Tensor, weights: ExpertWeights) -> Tensor:
    """rows [R, D] with counts[e] rows of expert e in turn, each times scale [R] -> [R, D]. Rows past the last expert's are never read;
    their output is zero."""
    capacity = int(counts_E.max()) if counts_E.numel() else 0
    num_experts, hidden_size = weights.down_EDF.shape[:2]
    slot_C = torch.arange(capacity, device=rows_RD.device)
    ends_E = counts_E.cumsum(0)
    used_EC = slot_C < counts_E[:, None]
    row_EC = ((ends_E - counts_E)[:, None] + slot_C).masked_fill(~used_EC, 0)
    if capacity == 0:
        # Nothing to compute; the products of empty batches keep the graph whole, so that every weight gets a zero gradient.
        row_EC = row_EC.new_zeros(num_experts, 0)
    padded_ECD = rows_RD[row_EC.flatten()].view(num_experts, capacity, hidden_size).masked_fill(~used_EC[..., None], 0)
    hidden_ECG = padded_ECD @ weights.gate_up_EGD.mT
    if weights.gate_up_bias_EG is not None:
        hidden_ECG = hidden_ECG + weights.gate_up_bias_EG[:, None]
    scale_EC1 = scale_R[row_EC.flatten()].view(num_experts, capacity, 1).masked_fill(~used_EC[..., None], 0)
    out_ECD = (activate(hidden_ECG, weights.activation) * scale_EC1) @ weights.down_EDF.mT
    if weights.down_bias_ED is not None:
        out_ECD = out_ECD + weights.down_bias_ED[:, None] * scale_EC1
    return _unpad(out_ECD, used_EC, rows_RD.shape[0])


def _unpad(out_ECD: Tensor, used_EC: Tensor, num_rows: int) -> Tensor:
    picked_RD = out_ECD.flatten(0, 1)[used_EC.flatten().nonzero().squeeze(1)]
    return torch.nn.functional.pad(picked_RD, (0, 0, 0, num_rows - picked_RD.shape[0]))
