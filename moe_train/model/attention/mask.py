"""Which keys a query may see: causal, inside its own document, optionally inside a sliding window. Built once per forward pass and
shared by all layers.

Shapes: B sequences, T queries, S keys (S = T without a cache).
"""

from __future__ import annotations

import torch
from torch import Tensor


class AttentionMask:
    """document_ids_BT int64 (equal within a document). Dense masks are made on first use and kept for the following layers."""

    def __init__(self, document_ids_BT: Tensor) -> None:
        self.document_ids_BT = document_ids_BT
        self.single_document = bool((document_ids_BT == document_ids_BT[:, :1]).all())
        self._dense: dict[int | None, Tensor | None] = {}

    def dense(self, window: int | None = None) -> Tensor | None:
        """bool [B or 1, 1, T, T], True where query t may see key s; None when plain causal masking says it all."""
        if window not in self._dense:
            self._dense[window] = self._build(window)
        return self._dense[window]

    def _build(self, window: int | None) -> Tensor | None:
        num_tokens = self.document_ids_BT.shape[1]
        if self.single_document and (window is None or window >= num_tokens):
            return None
        index_T = torch.arange(num_tokens, device=self.document_ids_BT.device)
        distance_TS = index_T[:, None] - index_T[None, :]
        allowed_TS = distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)
        same_BTS = self.document_ids_BT[:, :, None] == self.document_ids_BT[:, None, :]
        return (same_BTS & allowed_TS).unsqueeze(1)


def cached_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [1, 1, T, S] for T new tokens at the end of S cached ones."""
    query_T = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance_TS = query_T[:, None] - torch.arange(num_keys, device=device)[None, :]
    allowed_TS = distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)
    return allowed_TS[None, None]
