"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 §2.2).

Depth k predicts token t_{i+k+1} from  h^k_i = Block( M_k [ RMSNorm(h^{k-1}_i) ; RMSNorm(Emb(t_{i+k})) ] )  (eq. 21-23), with the embedding
and the head of the main model. Loss: λ/D Σ_k CE_k (eq. 24-25). Labels never cross a document; positions without a label are not counted by
the router.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.model.batch import IGNORE, Batch, ForwardContext, shift_left
from moe_train.model.norm import RMSNorm


@dataclass
class MTPTargets:
    tokens_BT: Tensor
    """t_{i+k}, 0 where it does not exist (such positions have no label)."""
    labels_BT: Tensor
    valid_BT: Tensor


def mtp_targets(batch: Batch, k: int) -> MTPTargets:
    """Inputs and labels of depth k >= 1."""
    tokens_BT, _ = shift_left(batch.tokens_BT, batch.document_ids_BT, k, fill=0)
    labels_BT, _ = shift_left(batch.labels_BT, batch.document_ids_BT, k, fill=IGNORE)
    return MTPTargets(tokens_BT, labels_BT, labels_BT != IGNORE)


class MTPModule(nn.Module):
    """One depth of prediction: projection of [h; embedding], one block, one norm. Input and output [B, T, D]."""

    def __init__(self, config: ModelConfig, block: nn.Module) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = block
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, hidden_BTD: Tensor, embedding_BTD: Tensor, ctx: ForwardContext) -> Tensor:
        x_BTD = self.projection(torch.cat([self.hidden_norm(hidden_BTD), self.embedding_norm(embedding_BTD)], dim=-1))
        return self.norm(self.block(x_BTD, ctx))
