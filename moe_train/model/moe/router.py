"""The router: which experts a token visits, and with which weights.

Shapes: B sequences, T tokens, N = B·T, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_train.config import BalanceConfig, ModelConfig, RouterConfig
from moe_train.model.batch import ForwardContext
from moe_train.model.recompute import is_replay, routed


@dataclass
class Routing:
    """expert_ids_NK int64; weights_NK fp32, from unbiased scores; scores_NE fp32 (all experts); logits_NE fp32."""

    expert_ids_NK: Tensor
    weights_NK: Tensor
    scores_NE: Tensor
    logits_NE: Tensor


class Router(nn.Module):
    """Scores in fp32 whatever the model's precision. `selection_bias` [E] fp32 is a buffer that acts on the choice only (arXiv:2408.15664)."""

    selection_bias: Tensor

    def __init__(self, config: ModelConfig, balance: BalanceConfig, layer: int) -> None:
        super().__init__()
        moe = config.moe
        self.layer, self.config, self.balance, self.top_k = layer, moe.router, balance, moe.top_k
        self.num_experts = moe.num_experts
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.linear_bias = nn.Parameter(torch.zeros(moe.num_experts)) if moe.router.linear_bias else None
        self.register_buffer("selection_bias", torch.zeros(moe.num_experts))

    def reset_buffers(self) -> None:
        self.selection_bias.zero_()

    def forward(self, x_BTD: Tensor, ctx: ForwardContext) -> Routing:
        x_ND = x_BTD.flatten(0, 1).float()
        bias = None if self.linear_bias is None else self.linear_bias.float()
        logits_NE = F.linear(x_ND, self.weight.float(), bias)
        scores_NE = score(logits_NE, self.config)
        ids_NK = routed(lambda: self._choose(scores_NE.detach()))
        weights_NK = self._weights(logits_NE, scores_NE, ids_NK)
        if ctx.recorder is not None and not is_replay():
            ctx.recorder.add(ctx.recorder.load, self.layer, torch.bincount(ids_NK.flatten(), minlength=self.num_experts))
        return Routing(ids_NK, weights_NK, scores_NE, logits_NE)

    def _choose(self, scores_NE: Tensor) -> Tensor:
        return (scores_NE + self.selection_bias).topk(self.top_k, dim=-1).indices

    def _weights(self, logits_NE: Tensor, scores_NE: Tensor, ids_NK: Tensor) -> Tensor:
        if self.config.score == "softmax" and self.config.softmax_order == "after_topk":
            weights_NK = logits_NE.gather(-1, ids_NK).softmax(-1)
        else:
            weights_NK = scores_NE.gather(-1, ids_NK)
            if self.config.normalize_topk:
                weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return weights_NK * self.config.scaling_factor


def score(logits_NE: Tensor, config: RouterConfig) -> Tensor:
    """softmax, sigmoid, or sqrt(softplus) (DeepSeek-V4) of the logits."""
    if config.score == "softmax":
        return logits_NE.softmax(-1)
    if config.score == "sigmoid":
        return logits_NE.sigmoid()
    return F.softplus(logits_NE).sqrt()
