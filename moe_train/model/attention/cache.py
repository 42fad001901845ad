"""What a layer keeps of the past while generating: keys and values (GQA), or the latent beside the rotary key (MLA).

Shapes: B sequences, S cached tokens.
"""

from __future__ import annotations

from torch import Tensor

from moe_train.config import ModelConfig

SMALLEST_BUFFER = 64


class LayerCache:
    """Tensors [B, S, …] that grow at the end. Room is taken in doubling steps, so that a token costs one token's copy."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens seen so far, those forgotten included: the position of the next one."""
        self._buffers: list[Tensor] = []
        self._first = self._end = 0
        """The tokens kept are `_first` … `_end` - 1 of the buffers."""

    def append(self, *new: Tensor, keep: int | None = None) -> tuple[Tensor, ...]:
        """Add T tokens to each tensor and return all that is kept with them. keep: how many tokens the first of the new ones may still see
        (the window less itself), None for all; those before are forgotten."""
        num_new = new[0].shape[1]
        if keep is not None:
            self._first = max(self._first, self._end - keep)
        if not self._buffers or self._end + num_new > self._buffers[0].shape[1]:
            self._take_room(new)
        start, self._end = self._end, self._end + num_new
        self.length += num_new
        for buffer, tokens in zip(self._buffers, new, strict=True):
            buffer[:, start : self._end] = tokens
        return tuple(buffer[:, self._first : self._end] for buffer in self._buffers)

    def _take_room(self, new: tuple[Tensor, ...]) -> None:
        """Larger buffers that begin with the tokens kept."""
        kept = self._end - self._first
        size = max(2 * (kept + new[0].shape[1]), SMALLEST_BUFFER)
        buffers = [tokens.new_empty(tokens.shape[0], size, *tokens.shape[2:]) for tokens in new]
        for buffer, old in zip(buffers, self._buffers, strict=False):
            buffer[:, :kept] = old[:, self._first : self._end]
        self._buffers, self._first, self._end = buffers, 0, kept


def cache_scalars_per_token(config: ModelConfig, layer: int | None = None) -> int:
    """Numbers that one past token costs in one layer, or in all (layer None) while no window has filled: latent and rotary key (MLA; 576 in
    DeepSeek-V3), or a key and a value for each key/value head (GQA). A layer with a sliding window keeps at most the window."""
    a = config.attention
    if layer is None:
        return sum(cache_scalars_per_token(config, i) for i in range(config.num_layers))
    return a.kv_lora_rank + a.qk_rope_head_dim if a.kind == "mla" else 2 * a.num_kv_heads * a.head_dim
