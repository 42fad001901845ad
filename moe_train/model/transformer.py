"""The model, top to bottom: tokens -> embedding -> blocks -> norm -> head -> summed token loss. Plain PyTorch; knows no rank and no config
framework.

Shape suffixes: B sequences, T tokens, N = B·T, D hidden, V vocabulary, L layers.
A block: x += attention(norm(x)); x += ffn(norm(x)), where ffn is dense or a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe_train.config import BalanceConfig, ModelConfig
from moe_train.model.attention import AttentionMask, LayerCache, build_attention, rotation
from moe_train.model.batch import Batch, Denominators, ForwardContext, LossOutput, Recorder, document_positions
from moe_train.model.ffn import DenseFFN
from moe_train.model.init import init_weights
from moe_train.model.loss import cross_entropy_sum
from moe_train.model.moe import MoE
from moe_train.model.mtp import MTPModule, mtp_targets
from moe_train.model.norm import RMSNorm
from moe_train.model.recompute import recompute


class Block(nn.Module):
    """One pre-norm Transformer layer. x [B, T, D] -> [B, T, D]."""

    def __init__(
        self, config: ModelConfig, balance: BalanceConfig, layer: int, ffn_kind: str, recompute_parts: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.layer = layer
        self.recompute_parts = recompute_parts
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = build_attention(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn: nn.Module = (
            MoE(config, balance, layer, recompute_experts="experts" in recompute_parts)
            if ffn_kind == "moe"
            else DenseFFN(config, config.ffn_hidden_size)
        )

    def forward(self, x_BTD: Tensor, ctx: ForwardContext, cache: LayerCache | None = None) -> Tensor:
        if not self.training or not torch.is_grad_enabled() or not self.recompute_parts:
            x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), ctx, cache)
            return x_BTD + self._ffn(self.ffn_norm(x_BTD), ctx)
        if "block" in self.recompute_parts:
            return recompute(self._whole, x_BTD, ctx)
        x_BTD = x_BTD + self._part("attention", self.attention_norm, lambda y: self.attention(y, ctx, None), x_BTD)
        return x_BTD + self._part("ffn", self.ffn_norm, lambda y: self._ffn(y, ctx), x_BTD)

    def _whole(self, x_BTD: Tensor, ctx: ForwardContext) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), ctx, None)
        return x_BTD + self._ffn(self.ffn_norm(x_BTD), ctx)

    def _part(self, name: str, norm: nn.Module, body: Callable[[Tensor], Tensor], x_BTD: Tensor) -> Tensor:
        """body(norm(x)), recomputing the norm, the body, or both, as `recompute_parts` asks."""
        if name in self.recompute_parts:
            return recompute(lambda x: body(norm(x)), x_BTD)
        return body(recompute(norm, x_BTD) if "norms" in self.recompute_parts else norm(x_BTD))

    def _ffn(self, x_BTD: Tensor, ctx: ForwardContext) -> Tensor:
        return self.ffn(x_BTD, ctx) if isinstance(self.ffn, MoE) else self.ffn(x_BTD)


class Transformer(nn.Module):
    """A decoder-only language model with any pattern of dense and MoE layers, MLA or grouped-query attention, and multi-token prediction.

    recompute_parts: () none; ("block",) full; any of config.run.RECOMPUTE_PARTS selective.
    Build it on the meta device to count parameters; call `init_weights(seed)` once it lives on a real device.
    """

    def __init__(self, config: ModelConfig, balance: BalanceConfig | None = None, recompute_parts: tuple[str, ...] = ()) -> None:
        super().__init__()
        balance = balance or BalanceConfig()
        self.config, self.balance = config, balance
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = config.ffn_kinds()
        self.blocks = nn.ModuleList(Block(config, balance, i, kind, recompute_parts) for i, kind in enumerate(kinds))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.mtp = nn.ModuleList(
            MTPModule(config, Block(config, balance, config.num_layers + k, kinds[-1], recompute_parts)) for k in range(config.mtp.depth)
        )

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; the values depend on the seed and the parameter's name alone, so no layout changes them."""
        init_weights(self, self.config, seed)

    def forward(
        self,
        batch: Batch,
        denominators: Denominators | None = None,
        recorder: Recorder | None = None,
        global_load: dict[int, Tensor] | None = None,
    ) -> LossOutput:
        """Loss of one micro-batch. Without denominators its own counts are used and, outside training, no balancing gradient is
        injected."""
        counts = denominators or Denominators.of(batch, self.config.mtp.depth)
        attention, positions_BT = self.config.attention, document_positions(batch.document_ids_BT)
        ctx = ForwardContext(
            positions_BT=positions_BT,
            mask=AttentionMask(batch.document_ids_BT, attention.sliding_window),
            rotation=rotation(attention, positions_BT),
            valid_BT=None if bool(batch.valid_BT.all()) else batch.valid_BT,
            denominators=counts if self.training else None,
            recorder=recorder,
            global_load=global_load,
        )
        x_BTD = self.embedding(batch.tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, ctx)
        x_BTD = self.norm(x_BTD)
        lm_sum = cross_entropy_sum(x_BTD.flatten(0, 1), self.head.weight, batch.labels_BT.flatten())
        loss = lm_sum / max(counts.labels, 1)
        mtp_sums = []
        for k, module in enumerate(self.mtp, start=1):
            targets = mtp_targets(batch, k)
            count = counts.mtp[k - 1]
            mtp_ctx = replace(ctx, valid_BT=targets.valid_BT, denominators=ctx.denominators and replace(counts, tokens=count))
            x_BTD = module(x_BTD, self.embedding(targets.tokens_BT), mtp_ctx)
            mtp_sum = cross_entropy_sum(x_BTD.flatten(0, 1), self.head.weight, targets.labels_BT.flatten())
            loss = loss + self.config.mtp.loss_weight / len(self.mtp) * mtp_sum / max(count, 1)
            mtp_sums.append(mtp_sum.detach())
        return LossOutput(loss, lm_sum.detach(), mtp_sums)

    def logits(self, tokens_BT: Tensor, document_ids_BT: Tensor | None = None, cache: list[LayerCache] | None = None) -> Tensor:
        """Next-token logits [B, T, V] of the main model (no MTP). With a cache, tokens continue the cached text and the cache grows."""
        if cache and document_ids_BT is not None:
            raise ValueError("a cache holds one document a row: pass document_ids_BT or a cache, not both")
        documents_BT = torch.zeros_like(tokens_BT) if document_ids_BT is None else document_ids_BT
        positions_BT = document_positions(documents_BT) + (cache[0].length if cache else 0)
        attention = self.config.attention
        mask = AttentionMask(documents_BT, attention.sliding_window)
        ctx = ForwardContext(positions_BT=positions_BT, mask=mask, rotation=rotation(attention, positions_BT))
        x_BTD = self.embedding(tokens_BT)
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, ctx, cache[i] if cache else None)
        return self.head(self.norm(x_BTD))
