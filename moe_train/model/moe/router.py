"""The router: which experts a token visits, and with which weights.

Scores s = softmax(l), sigmoid(l) or sqrt(softplus(l)) of l = W x in fp32. The K experts with the largest s + b are chosen (b: the
selection bias, arXiv:2408.15664), inside the best groups where routing is group-limited (DeepSeek-V3 §2.1.2); the weights come from s
without b.

Shapes: B sequences, T tokens, N = B·T, E experts, K experts per token, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_train.config import BalanceConfig, ModelConfig, RouterConfig
from moe_train.model.balancing.inject import inject
from moe_train.model.balancing.load_balance import global_batch_loss, micro_batch_loss, sequence_loss
from moe_train.model.balancing.quantile import histogram
from moe_train.model.balancing.sinkhorn import sinkhorn
from moe_train.model.balancing.z_loss import z_loss
from moe_train.model.batch import ForwardContext
from moe_train.model.recompute import is_replay, routed


@dataclass
class Routing:
    """expert_ids_NK int64, distinct in a row; weights_NK fp32, from unbiased scores; keep_NK bool, False where a choice is dropped (over
    capacity, or padding), None when all are kept."""

    expert_ids_NK: Tensor
    weights_NK: Tensor
    keep_NK: Tensor | None = None


class Router(nn.Module):
    """x [B, T, D] -> Routing. Parameters and the bias stay fp32 in a model of any precision (`keep_fp32`)."""

    keep_fp32 = True
    selection_bias: Tensor

    def __init__(self, config: ModelConfig, balance: BalanceConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.config, self.moe, self.balance = layer, config.moe.router, config.moe, balance
        self.num_experts, self.top_k = config.moe.num_experts, config.moe.top_k
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.linear_bias = nn.Parameter(torch.zeros(self.num_experts)) if self.config.linear_bias else None
        # A buffer in every model, whether a balancing rule moves it or not, so that it is always saved and loaded.
        self.register_buffer("selection_bias", torch.zeros(self.num_experts, dtype=torch.float32))

    def reset_buffers(self) -> None:
        self.selection_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move devices but never change precision: model.bfloat16() leaves the router's bits alone."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype and tensor.is_floating_point() else moved

        return super()._apply(keep_dtype, recurse)

    def forward(self, x_BTD: Tensor, ctx: ForwardContext) -> Routing:
        valid_N = None if ctx.valid_BT is None else ctx.valid_BT.flatten()
        logits_NE = self._logits(x_BTD.flatten(0, 1))
        scores_NE = score(logits_NE, self.config)
        ids_NK = routed(lambda: self._choose(logits_NE.detach(), scores_NE.detach(), valid_N))
        load_E = routed(lambda: count(ids_NK, valid_N, self.num_experts))
        weights_NK = self._weights(logits_NE, scores_NE, ids_NK)
        keep_NK = self._keep(ids_NK, weights_NK.detach(), valid_N)
        if ctx.recorder is not None and not is_replay():
            self._record(ctx, scores_NE.detach(), load_E, keep_NK, valid_N)
        if ctx.denominators is not None and self.training:
            weights_NK = self._balance(weights_NK, logits_NE, load_E, ctx)
        return Routing(ids_NK, weights_NK, keep_NK)

    def _logits(self, x_ND: Tensor) -> Tensor:
        x_ND = x_ND.float()
        if self.config.jitter and self.training:
            x_ND = x_ND * torch.empty_like(x_ND).uniform_(1 - self.config.jitter, 1 + self.config.jitter)
        return F.linear(x_ND, self.weight, self.linear_bias)

    def _choose(self, logits_NE: Tensor, scores_NE: Tensor, valid_N: Tensor | None) -> Tensor:
        if self.config.force_balanced:
            deal_NK = torch.arange(scores_NE.shape[0] * self.top_k, device=scores_NE.device).view(-1, self.top_k)
            return deal_NK % self.num_experts
        if self.balance.sinkhorn_iterations and self.training:
            return sinkhorn(logits_NE, self.balance.sinkhorn_iterations, valid_N).topk(self.top_k, dim=-1).indices
        biased_NE = scores_NE + self.selection_bias
        if self.config.num_groups > 1:
            biased_NE = limit_to_groups(biased_NE, self.config)
        return biased_NE.topk(self.top_k, dim=-1).indices

    def _weights(self, logits_NE: Tensor, scores_NE: Tensor, ids_NK: Tensor) -> Tensor:
        if self.config.score == "softmax" and self.config.softmax_order == "after_topk":
            weights_NK = logits_NE.gather(-1, ids_NK).softmax(-1)
        else:
            weights_NK = scores_NE.gather(-1, ids_NK)
            if self.config.normalize_topk:
                weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return weights_NK * self.config.scaling_factor

    def _keep(self, ids_NK: Tensor, weights_NK: Tensor, valid_N: Tensor | None) -> Tensor | None:
        keep_NK = None if valid_N is None else valid_N.unsqueeze(-1).expand_as(ids_NK)
        if self.moe.capacity_factor is None:
            return keep_NK
        tokens = ids_NK.shape[0] if valid_N is None else int(valid_N.sum())
        capacity = expert_capacity(tokens, self.top_k, self.num_experts, self.moe.capacity_factor)
        # Replayed too: weights that differ in the last bit could drop another choice and change the number of rows.
        return routed(lambda: within_capacity(ids_NK, weights_NK, keep_NK, capacity, by_score=self.moe.drop_policy == "score"))

    @torch.no_grad()
    def _record(self, ctx: ForwardContext, scores_NE: Tensor, load_E: Tensor, keep_NK: Tensor | None, valid_N: Tensor | None) -> None:
        recorder = ctx.recorder
        assert recorder is not None
        recorder.add(recorder.load, self.layer, load_E)
        if self.moe.capacity_factor is not None and keep_NK is not None:
            recorder.add(recorder.dropped, self.layer, load_E.sum() - keep_NK.sum())
        if self.balance.bias == "quantile" and self.training:
            required = histogram(scores_NE, self.selection_bias, self.top_k, self.balance.quantile_bins, valid_N)
            recorder.add(recorder.required_bias, self.layer, required)

    def _balance(self, weights_NK: Tensor, logits_NE: Tensor, load_E: Tensor, ctx: ForwardContext) -> Tensor:
        """Inject the gradient of each loss that is on: coefficient × (this micro-batch's tokens / the global batch's) × loss."""
        balance, denominators = self.balance, ctx.denominators
        assert denominators is not None
        valid_N = None if ctx.valid_BT is None else ctx.valid_BT.flatten()
        share = load_E.sum() / (self.top_k * max(denominators.tokens, 1))
        probs_NE = probabilities(logits_NE, self.config)

        def sequence() -> Tensor:
            # Eq. 18 counts the K best scores s, not what bias and groups make of them (megatron-core does so too).
            best_NK = routed(lambda: probs_NE.detach().topk(self.top_k, dim=-1).indices)
            shape = ctx.positions_BT.shape
            return sequence_loss(probs_NE.unflatten(0, shape), best_NK.unflatten(0, shape), ctx.valid_BT)

        methods: list[tuple[str, float, Callable[[], Tensor]]] = [
            ("aux_loss", balance.aux_coef, lambda: micro_batch_loss(probs_NE, load_E, valid_N)),
            ("seq_aux_loss", balance.seq_aux_coef, sequence),
            ("global_aux_loss", balance.global_aux_coef, lambda: global_batch_loss(probs_NE, self._global_load(load_E, ctx), valid_N)),
            ("z_loss", balance.z_coef, lambda: z_loss(logits_NE, valid_N)),
        ]
        for name, coefficient, loss_of in methods:
            if coefficient:
                loss = loss_of() * share
                weights_NK = inject(weights_NK, coefficient * loss)
                if ctx.recorder is not None and not is_replay():
                    ctx.recorder.add_loss(name, self.layer, loss)
        return weights_NK

    def _global_load(self, load_E: Tensor, ctx: ForwardContext) -> Tensor:
        """Counts of the global batch: known beforehand, or (`buffer`) of the micro-batches so far, or this micro-batch is all there is."""
        if ctx.global_load is not None:
            return ctx.global_load[self.layer]
        if self.balance.global_counts == "buffer" and ctx.recorder is not None:
            seen = ctx.recorder.load[self.layer]
            return routed(seen.clone)
        return load_E


def score(logits_NE: Tensor, config: RouterConfig) -> Tensor:
    """softmax, sigmoid, or sqrt(softplus) (DeepSeek-V4) of the logits. With softmax after top-k the choice is made on the logits
    themselves."""
    if config.score == "softmax":
        return logits_NE if config.softmax_order == "after_topk" else logits_NE.softmax(-1)
    return logits_NE.sigmoid() if config.score == "sigmoid" else F.softplus(logits_NE).sqrt()


def probabilities(logits_NE: Tensor, config: RouterConfig) -> Tensor:
    """The scores as a distribution over all experts, for the balancing losses: softmax, or s / Σ s (DeepSeek-V3 eq. 19)."""
    if config.score == "softmax":
        return logits_NE.softmax(-1)
    scores_NE = score(logits_NE, config)
    return scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)


def limit_to_groups(biased_NE: Tensor, config: RouterConfig) -> Tensor:
    """-inf outside the topk_groups best groups. A group's score is the sum of its two best biased scores (DeepSeek-V3) or its best one
    (V2). A mask of 0 instead would let a masked expert win over a chosen one whose biased score is negative."""
    grouped_NGE = biased_NE.unflatten(-1, (config.num_groups, -1))
    if config.group_score == "top2_sum":
        group_NG = grouped_NGE.topk(min(2, grouped_NGE.shape[-1]), dim=-1).values.sum(-1)
    else:
        group_NG = grouped_NGE.amax(-1)
    chosen = group_NG.topk(config.topk_groups, dim=-1).indices
    open_NG = torch.zeros_like(group_NG, dtype=torch.bool).scatter_(-1, chosen, True)
    return grouped_NGE.masked_fill(~open_NG.unsqueeze(-1), -math.inf).flatten(-2)


def count(ids_NK: Tensor, valid_N: Tensor | None, num_experts: int) -> Tensor:
    """int64 [E]: choices of each expert by valid tokens. Counts above 2^8 in bf16 or 2^24 in fp32 would be rounded."""
    ids = ids_NK if valid_N is None else ids_NK[valid_N]
    return torch.bincount(ids.flatten(), minlength=num_experts)


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """ceil(factor · N · K / E): the most tokens of a micro-batch that an expert takes."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def within_capacity(ids_NK: Tensor, weights_NK: Tensor, keep_NK: Tensor | None, capacity: int, by_score: bool) -> Tensor:
    """bool [N, K]: the first `capacity` choices of each expert, by weight (largest first) or by position. Choices not kept before take no
    place."""
    ids, order = ids_NK.flatten(), torch.arange(ids_NK.numel(), device=ids_NK.device)
    if by_score:
        order = weights_NK.flatten().argsort(descending=True, stable=True)
    if keep_NK is not None:
        order = order[keep_NK.flatten()[order]]
    order = order[ids[order].argsort(stable=True)]
    experts = ids[order]
    counts_E = torch.bincount(experts, minlength=int(ids.max()) + 1 if ids.numel() else 1)
    rank = torch.arange(order.numel(), device=ids.device) - (counts_E.cumsum(0) - counts_E)[experts]
    keep = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    keep[order[rank < capacity]] = True
    return keep.view_as(ids_NK)
