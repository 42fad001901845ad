"""The expert FFN against a dense FFN of equal FLOPs: 4,096 tokens × top-4, hidden 512, expert width 256, forward and backward, in turn.

The expert FFN is everything between the router's choice and the sum over experts: dispatch, experts, combine. Skew 4 : 1 means that a
quarter of the experts are four times as likely as the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_train.config import ModelConfig, MoEConfig
from moe_train.model.ffn import DenseFFN
from moe_train.model.moe.dispatch import LocalDispatcher
from moe_train.model.moe.experts import Experts
from moe_train.train.allocator import keep_freed_memory

TOKENS, TOP_K, HIDDEN, WIDTH = 4096, 4, 512, 256
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class ExpertResult:
    """shares: time of the dense FFN over time of the experts, one a round (1 = no loss)."""

    experts: int
    skew: int
    backend: str
    precision: str
    shares: list[float]
    dense_ms: float

    @property
    def share(self) -> float:
        return statistics.median(self.shares)


def measure(num_experts: int, skew: int, precision: str, rounds: int, backend: str = "auto") -> ExpertResult:
    """Alternating rounds after two rounds of warm-up."""
    keep_freed_memory()
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    x_ND, grad_ND = torch.randn(TOKENS, HIDDEN, dtype=dtype), torch.randn(TOKENS, HIDDEN, dtype=dtype)
    dense = _initialised(DenseFFN(ModelConfig(hidden_size=HIDDEN), TOP_K * WIDTH), dtype)
    run_experts = _expert_step(num_experts, skew, backend, dtype, x_ND, grad_ND)

    def run_dense() -> None:
        dense(x_ND.detach().requires_grad_()).backward(grad_ND)
        dense.zero_grad(set_to_none=True)

    times = [(_seconds(run_dense), _seconds(run_experts)) for _ in range(rounds + 2)][2:]
    shares = [dense_s / experts_s for dense_s, experts_s in times]
    return ExpertResult(num_experts, skew, backend, precision, shares, 1e3 * statistics.median(dense_s for dense_s, _ in times))


def _expert_step(num_experts: int, skew: int, backend: str, dtype: torch.dtype, x_ND: Tensor, grad_ND: Tensor) -> Callable[[], None]:
    moe = MoEConfig(num_experts=num_experts, top_k=TOP_K, expert_hidden_size=WIDTH, backend=backend)
    experts = _initialised(Experts(ModelConfig(hidden_size=HIDDEN, moe=moe)), dtype)
    dispatcher = LocalDispatcher(moe)
    likelihood_E = torch.ones(num_experts)
    likelihood_E[: num_experts // 4] = skew
    # New choices in each step, as in training: a matmul shape that never returns pays for its set-up.
    choices = [torch.multinomial(likelihood_E.expand(TOKENS, -1), TOP_K) for _ in range(8)]
    weights_NK = torch.rand(TOKENS, TOP_K)
    turn = iter(range(10**9))

    def step() -> None:
        x, weights = x_ND.detach().requires_grad_(), weights_NK.detach().requires_grad_()
        rows, weights_R, plan = dispatcher.dispatch(x, choices[next(turn) % len(choices)], weights)
        dispatcher.combine(experts(rows, plan.counts_E, weights_R), plan).backward(grad_ND)
        experts.zero_grad(set_to_none=True)

    return step


def _initialised(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    return module.to(dtype)


def _seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
