"""All routed experts of a layer as stacked weights: expert e computes down_e( act(gate_e(x), up_e(x)) ) on its own rows.

Shapes: R rows sorted by expert, D hidden, E experts, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.model.ffn import gated_activation


class Experts(nn.Module):
    """rows [R, D] sorted by expert and their counts [E] -> [R, D].

    gate_up_proj [E, 2F, D]: gate in the first F rows, up in the last F; down_proj [E, D, F]; optional biases [E, 2F] and [E, D].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.kind, self.limit, self.alpha = config.activation, config.swiglu_limit, config.swiglu_alpha
        self.gate_up_proj = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.expert_hidden_size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, moe.expert_hidden_size))
        self.gate_up_bias = nn.Parameter(torch.zeros(moe.num_experts, 2 * moe.expert_hidden_size)) if moe.expert_bias else None
        self.down_bias = nn.Parameter(torch.zeros(moe.num_experts, config.hidden_size)) if moe.expert_bias else None

    def forward(self, rows_RD: Tensor, counts: list[int]) -> Tensor:
        # unbind, never index: the backward of an index writes a zero tensor of the whole stack for each expert.
        gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
        outputs = []
        for e, rows in enumerate(rows_RD.split(counts)):
            hidden = torch.nn.functional.linear(rows, gate_up[e], None if self.gate_up_bias is None else self.gate_up_bias[e])
            gate, up = hidden.chunk(2, dim=-1)
            hidden = gated_activation(gate, up, self.kind, self.limit, self.alpha)
            outputs.append(torch.nn.functional.linear(hidden, down[e], None if self.down_bias is None else self.down_bias[e]))
        return torch.cat(outputs)
