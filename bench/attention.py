"""Attention in blocks (moe_train/model/attention/blocked.py) against PyTorch's fused one: shape A's 8/2 heads × 64, 4 rows of 512 tokens,
forward and backward, in turn. Packed rows hold documents of 128 tokens; fused attention then needs a mask of T × T.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.shapes import A
from moe_train.model.attention.attend import attend, attend_on_accelerator
from moe_train.model.attention.mask import AttentionMask

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DOCUMENT = 128


@dataclass
class AttentionResult:
    """ratios: time of fused attention over time of blocks, one a round (above 1: blocks are faster)."""

    precision: str
    packed: bool
    ratios: list[float]
    blocks_ms: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def measure(precision: str, packed: bool, rounds: int) -> AttentionResult:
    """Alternating rounds after two rounds of warm-up."""
    torch.manual_seed(0)
    documents_T = torch.arange(A.sequence) // DOCUMENT if packed else torch.zeros(A.sequence, dtype=torch.long)
    visible = AttentionMask(documents_T.expand(A.micro_batch, -1)).visible()

    def random(heads: int) -> Tensor:
        return torch.randn(A.micro_batch, heads, A.sequence, A.head_dim).to(DTYPES[precision]).requires_grad_()

    q, k, v, grad = random(A.heads), random(A.kv_heads), random(A.kv_heads), random(A.heads).detach()

    def seconds(way: Callable[..., Tensor]) -> float:
        begin = time.perf_counter()
        torch.autograd.grad(way(q, k, v, visible, A.head_dim**-0.5), (q, k, v), grad)
        return time.perf_counter() - begin

    times = [(seconds(attend_on_accelerator), seconds(attend)) for _ in range(rounds + 2)][2:]
    ratios = [fused / blocks for fused, blocks in times]
    return AttentionResult(precision, packed, ratios, 1e3 * statistics.median(blocks for _, blocks in times))
