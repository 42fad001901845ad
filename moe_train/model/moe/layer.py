"""The MoE layer: y = Σ_shared FFN(x) + Σ_{k in top-K} w_k · Expert_{id_k}(x)  (DeepSeekMoE, arXiv:2401.06066 eq. 9).

Shapes: N tokens, D hidden, E experts, K experts per token, R rows (token copies on their way to experts).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_train.config import BalanceConfig, ModelConfig
from moe_train.model.batch import ForwardContext
from moe_train.model.ffn import DenseFFN
from moe_train.model.moe.dispatch import LocalDispatcher
from moe_train.model.moe.experts import Experts
from moe_train.model.moe.router import Router
from moe_train.model.recompute import recompute


class MoE(nn.Module):
    """x [B, T, D] -> [B, T, D]. `dispatcher` is replaced by an expert-parallel one when experts live on several ranks."""

    def __init__(self, config: ModelConfig, balance: BalanceConfig, layer: int, recompute_experts: bool = False) -> None:
        super().__init__()
        self.layer, self.recompute_experts = layer, recompute_experts
        self.router = Router(config, balance, layer)
        self.experts = Experts(config)
        self.dispatcher = LocalDispatcher(config.moe)
        shared = config.moe.num_shared_experts * config.moe.expert_hidden_size
        self.shared = DenseFFN(config, shared) if shared else None

    @torch.compiler.disable
    def forward(self, x_BTD: Tensor, ctx: ForwardContext) -> Tensor:
        # Not for torch.compile: sizes that depend on data break its graph in twenty places and would be compiled anew for each batch.
        x_ND = x_BTD.flatten(0, 1)
        routing = self.router(x_BTD, ctx)
        rows_RD, weights_R, plan = self.dispatcher.dispatch(x_ND, routing.expert_ids_NK, routing.weights_NK, routing.keep_NK)
        if self.recompute_experts and self.training:
            rows_RD = recompute(self.experts, rows_RD, plan.counts_E, weights_R)
        else:
            rows_RD = self.experts(rows_RD, plan.counts_E, weights_R)
        y_ND = self.dispatcher.combine(rows_RD, plan)
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND.view_as(x_BTD)
