"""Which keys a query may see: causal, inside its own document, optionally inside a sliding window.

Documents are runs of a row, so what a query may see is one interval of keys that ends at the query itself, and one number a query says it
all: its first visible key. No T × T matrix is needed where the attention kernel can read that number. It is made once per forward pass and
shared by all layers. A padding token sees the padding before it: every query sees itself, so no softmax is ever empty.

Shapes: B sequences, T queries, S keys (S = T without a cache).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.model.batch import PADDING, document_positions


@dataclass(frozen=True, eq=False)
class Visible:
    """Query t, the (t + S − T)-th of S keys, sees the keys first_BT[t] … t + S − T.

    first_BT: int64 [B or 1, T], never falling along a row; causal_only: it is 0 everywhere; window: the width that every query keeps to, or
    None.
    """

    first_BT: Tensor
    causal_only: bool
    window: int | None = None

    def dense(self, num_keys: int) -> Tensor:
        """bool [B or 1, 1, T, S], True where query t may see key s."""
        num_queries = self.first_BT.shape[1]
        key_S = torch.arange(num_keys, device=self.first_BT.device)
        own_key_T = key_S[num_keys - num_queries :]
        return ((key_S >= self.first_BT[:, :, None]) & (key_S <= own_key_T[:, None])).unsqueeze(1)


class AttentionMask:
    """document_ids_BT int64, equal within a document; a change of the number starts another document. window: the sliding window of the
    layers that have one."""

    def __init__(self, document_ids_BT: Tensor, window: int | None = None) -> None:
        num_tokens = document_ids_BT.shape[1]
        index_T = torch.arange(num_tokens, device=document_ids_BT.device)
        starts_BT = index_T - document_positions(document_ids_BT)
        one_document = not bool(starts_BT.any())
        if one_document:
            starts_BT = starts_BT[:1]
        self.padding_BT = document_ids_BT == PADDING
        self._visible: dict[int | None, Visible] = {None: Visible(starts_BT, one_document)}
        if window is not None:
            windowed = Visible(torch.maximum(starts_BT, index_T - window + 1), False, window)
            self._visible[window] = self._visible[None] if window >= num_tokens else windowed

    def visible(self, window: int | None = None) -> Visible:
        """Of a layer without a window, or with the one named when the mask was made."""
        return self._visible[window]


def visible_after(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Visible:
    """For T new tokens of one document at the end of S cached ones."""
    if window is None or window >= num_keys:
        return Visible(torch.zeros(1, num_queries, dtype=torch.long, device=device), causal_only=True)
    own_key_T = torch.arange(num_keys - num_queries, num_keys, device=device)
    return Visible((own_key_T - window + 1).clamp_(min=0).unsqueeze(0), False, window)
