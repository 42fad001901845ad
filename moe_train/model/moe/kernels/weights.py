"""The weights of all experts of a layer, and what lies between their two matmuls.

Shapes: E experts, D hidden, F expert width, G = 2F (gate in the first F columns, up in the last).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_train.model.ffn import Activation


@dataclass(frozen=True)
class ExpertWeights:
    """gate_up_EGD, down_EDF; biases None or gate_up_bias_EG, down_bias_ED."""

    gate_up_EGD: Tensor
    down_EDF: Tensor
    gate_up_bias_EG: Tensor | None
    down_bias_ED: Tensor | None
    activation: Activation
