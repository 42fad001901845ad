"""Loss on a finite split: sum of token losses over the number of labelled tokens. Counts nothing, draws nothing, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_train.model.batch import IGNORE, Batch
from moe_train.model.transformer import Transformer


@dataclass
class Evaluation:
    """loss: nats a token; tokens: labelled tokens seen."""

    loss: float
    tokens: int
    bytes_per_token: float

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2) / self.bytes_per_token

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: Transformer,
    batch_of: Callable[[int, int], Batch],
    num_sequences: int,
    micro_batch: int,
    bytes_per_token: float,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate sequences 0 … num_sequences - 1 of `batch_of(start, count)`. None when `stop()` asked to end in between."""
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    try:
        for start in range(0, num_sequences, micro_batch):
            if stop():
                return None
            batch = batch_of(start, min(micro_batch, num_sequences - start))
            tokens += int((batch.labels_BT != IGNORE).sum())
            total += model(batch.to(device)).lm_sum
    finally:
        model.train(was_training)
    return Evaluation(float(total) / max(tokens, 1), tokens, bytes_per_token)
