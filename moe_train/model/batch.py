"""What travels through the model beside the activations: the batch, the denominators of every mean, and the record of a step.

Shape suffixes: B sequences, T tokens a sequence, N = B·T tokens, L layers, E experts, K experts per token, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_train.model.attention.mask import AttentionMask
    from moe_train.model.attention.rope import Rotation

IGNORE = -100
"""Label of a position that has no loss (the value cross_entropy ignores)."""
PADDING = -1
"""Document id of a position that is padding. Padding is known by position, never by token id, so that pad == eos is harmless."""


@dataclass
class Batch:
    """One micro-batch of packed rows.

    tokens_BT int64; labels_BT int64, the next token of the same document or IGNORE; document_ids_BT int64, equal within a document,
    increasing along the row, PADDING where there is no token.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    document_ids_BT: Tensor

    @staticmethod
    def from_tokens(tokens_BT: Tensor, document_ids_BT: Tensor | None = None) -> Batch:
        """Labels by shifting left by one within each document; the last position of a row has no label."""
        if document_ids_BT is None:
            document_ids_BT = torch.zeros_like(tokens_BT)
        labels_BT, _ = shift_left(tokens_BT, document_ids_BT, 1, fill=IGNORE)
        return Batch(tokens_BT, labels_BT, document_ids_BT)

    @property
    def valid_BT(self) -> Tensor:
        return self.document_ids_BT != PADDING

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.tokens_BT.to(device), self.labels_BT.to(device), self.document_ids_BT.to(device))

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of `size` rows (the last may be smaller)."""
        parts = zip(self.tokens_BT.split(size), self.labels_BT.split(size), self.document_ids_BT.split(size), strict=True)
        return [Batch(*part) for part in parts]


def shift_left(values_BT: Tensor, document_ids_BT: Tensor, by: int, fill: int) -> tuple[Tensor, Tensor]:
    """values[i + by] where position i + by lies in the same document and row, else `fill`. Also returns where that held (bool [B, T])."""
    same_BT = torch.zeros_like(document_ids_BT, dtype=torch.bool)
    same_BT[:, :-by] = (document_ids_BT[:, by:] == document_ids_BT[:, :-by]) & (document_ids_BT[:, :-by] != PADDING)
    shifted_BT = torch.full_like(values_BT, fill)
    shifted_BT[:, :-by] = torch.where(same_BT[:, :-by], values_BT[:, by:], fill)
    return shifted_BT, same_BT


def document_positions(document_ids_BT: Tensor) -> Tensor:
    """Positions that restart at 0 with each document. [B, T] int64."""
    index_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    starts_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values


@dataclass
class Denominators:
    """Token counts of the *global* batch (all micro-batches, all ranks) that every sum of the step is divided by. Law: one denominator.

    tokens: tokens that are not padding (balancing losses); labels: positions with a label (LM loss); mtp: for each MTP depth k, positions
    whose (k+1)-th next token lies in the same document.
    """

    tokens: int
    labels: int
    mtp: list[int] = field(default_factory=list)

    @staticmethod
    def of(batch: Batch, mtp_depth: int = 0) -> Denominators:
        """Counts of a whole batch, before it is split into micro-batches."""
        mtp = [int((shift_left(batch.labels_BT, batch.document_ids_BT, k, IGNORE)[0] != IGNORE).sum()) for k in range(1, mtp_depth + 1)]
        return Denominators(int(batch.valid_BT.sum()), int((batch.labels_BT != IGNORE).sum()), mtp)


@dataclass
class Recorder:
    """What one optimizer step saw, summed over its micro-batches. Keys are layer indices (MTP blocks follow the main layers).

    load: int64 [E], tokens sent to each expert (dropped ones included, padding and recomputation never); dropped: int64 scalar;
    losses: name -> layer -> fp32 scalar, each already divided by the global denominator, so that the sum over micro-batches is the step's
    value;
    required_bias: int64 [E, bins], quantile balancing's histogram; qk_max: fp32 [H], the largest attention logit of each head (QK-clip).
    """

    want_qk_max: bool = False
    load: dict[int, Tensor] = field(default_factory=dict)
    dropped: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    required_bias: dict[int, Tensor] = field(default_factory=dict)
    qk_max: dict[int, Tensor] = field(default_factory=dict)

    def add(self, table: dict[int, Tensor], layer: int, value: Tensor) -> None:
        table[layer] = table[layer] + value if layer in table else value.clone()

    def add_loss(self, name: str, layer: int, value: Tensor) -> None:
        self.add(self.losses.setdefault(name, {}), layer, value.detach().float())

    def add_qk_max(self, layer: int, value_H: Tensor) -> None:
        self.qk_max[layer] = torch.maximum(self.qk_max[layer], value_H) if layer in self.qk_max else value_H


@dataclass
class ForwardContext:
    """What every block of one forward pass shares.

    positions_BT int64, restarting at each document (with a cache: counted from its start); valid_BT bool, False on padding, or None when
    all count; denominators None outside training (then no balancing gradient is injected); recorder None when nobody looks; global_load:
    layer -> [E] counts of the whole global batch for the global-batch loss, when they are known beforehand; rotation: cos and sin of the
    positions, which every attention layer needs.
    """

    positions_BT: Tensor
    mask: AttentionMask
    valid_BT: Tensor | None = None
    denominators: Denominators | None = None
    recorder: Recorder | None = None
    global_load: dict[int, Tensor] | None = None
    rotation: Rotation | None = None


@dataclass
class LossOutput:
    """Of one micro-batch. loss: scalar to call backward on, already divided by the denominators (LM + weighted MTP; balancing gradients are
    injected, not added); lm_sum and mtp_sums: summed token losses, fp32, detached."""

    loss: Tensor
    lm_sum: Tensor
    mtp_sums: list[Tensor]
