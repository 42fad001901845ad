"""Autoregressive generation with the latent or key/value cache: one pass over the prompt, then one token at a time.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.model.attention import LayerCache
from moe_train.model.transformer import Transformer


@dataclass
class Sampling:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens with at least this probability (nucleus sampling, arXiv:1904.09751);
    top_k keeps the k most likely ones (None: all)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0


@torch.no_grad()
def generate(model: Transformer, prompt: list[int], max_tokens: int, sampling: Sampling, stop_id: int | None = None) -> Iterator[int]:
    """Yield up to max_tokens token ids that continue `prompt` (at least one id); ends before `stop_id`. The model must be in eval mode."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = [LayerCache() for _ in model.blocks]
    tokens_BT = torch.tensor([prompt], device=device)
    for _ in range(max_tokens):
        logits_V = model.logits(tokens_BT, cache=cache)[0, -1].float().cpu()
        token = choose(logits_V, sampling, generator)
        if token == stop_id:
            return
        yield token
        tokens_BT = torch.tensor([[token]], device=device)


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id drawn from softmax(logits / temperature), cut by top_k, then by top_p."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    ordered_V, ids_V = (logits_V / sampling.temperature).sort(descending=True)
    if sampling.top_k is not None:
        ordered_V, ids_V = ordered_V[: sampling.top_k], ids_V[: sampling.top_k]
    probs_V = ordered_V.softmax(-1)
    # A token stays when those before it have less than top_p together: the first always does.
    probs_V = probs_V * (probs_V.cumsum(-1) - probs_V < sampling.top_p)
    return int(ids_V[torch.multinomial(probs_V, 1, generator=generator)])
