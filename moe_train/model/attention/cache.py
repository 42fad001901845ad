"""What a layer keeps of the past while generating: keys and values (GQA) or latents and rotary keys (MLA). Shapes: B, S cached tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Two growing tensors [B, S, …]. MLA: latent [B, S, kv_lora_rank] and rotary key [B, S, qk_rope_head_dim]; GQA: keys and values."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.second: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.first is None else self.first.shape[1]

    def append(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns everything cached."""
        if self.first is None or self.second is None:
            self.first, self.second = first, second
        else:
            self.first, self.second = torch.cat([self.first, first], dim=1), torch.cat([self.second, second], dim=1)
        return self.first, self.second
