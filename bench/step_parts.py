"""`python -m bench.step_parts`: where a step's time goes in A with 96 experts and in the dense model of its active size; writes
bench/records/DATE-cpu-step-parts.json.

Forward, backward and optimizer, in turn, medians. Beside the optimizer stands the time that one pass over its bytes takes here (a copy of
as many): a sparse model reads and writes all weights for tokens that use one in 24. Beside forward and backward stands the rate of one
product by its rows: 2,048 tokens × top-4 leave an expert of 96 some 85 rows, and each product must read a weight of its own.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from typing import Any

import torch

from bench import record
from bench.peers.ours import build
from bench.shapes import SHAPES
from moe_train.cli.openmp import SPIN_COUNT
from moe_train.model.linear import product_out

ROUNDS = 8
ADAMW_ACCESSES = 7
"""Reads of weight, gradient and two moments, writes of weight and two moments."""


class Timed:
    """A model and the seconds of the parts of its steps."""

    def __init__(self, shape: str, dtype: torch.dtype) -> None:
        self.shape = SHAPES[shape]
        self.model, self.loss_of = build(self.shape, dtype, "", compiled=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        self.bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def step(self) -> None:
        rows = torch.randint(0, self.shape.vocab, (self.shape.micro_batch, self.shape.sequence + 1))
        marks = [time.perf_counter()]
        loss = self.loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        for name, begin, end in zip(self.seconds, marks, marks[1:], strict=False):
            self.seconds[name].append(end - begin)

    def medians(self) -> dict[str, float]:
        """Without the first two steps."""
        return {name: statistics.median(values[2:]) for name, values in self.seconds.items()}


def copy_seconds(size: int) -> float:
    """Median time to copy half of `size` bytes (each is read or written once)."""
    source = torch.zeros(size // 2, dtype=torch.uint8)
    target, times = torch.empty_like(source), []
    for _ in range(7):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def product_gflops(rows: int, dtype: torch.dtype) -> float:
    """Median rate of rows × 512 by 512 × 512 (gate and up of one expert) over 64 experts' weights in turn."""
    x, weights = torch.randn(rows, 512).to(dtype), torch.randn(64, 512, 512).to(dtype).unbind(0)
    out, times = torch.empty(rows, 512, dtype=dtype), []
    for weight in (*weights, *weights):
        begin = time.perf_counter()
        product_out(x, weight, out)
        times.append(time.perf_counter() - begin)
    return 2 * rows * 512 * 512 / statistics.median(times[8:]) / 1e9


def measure(precision: str, dtype: torch.dtype) -> dict[str, Any]:
    sparse, dense = Timed("A96", dtype), Timed("dense", dtype)
    for _ in range(ROUNDS + 2):
        sparse.step()
        dense.step()
    parts = {"A96": sparse.medians(), "dense": dense.medians()}
    totals = {name: sum(values.values()) for name, values in parts.items()}
    weights = {"A96": sparse.bytes, "dense": dense.bytes}
    del sparse, dense
    return {
        "precision": precision,
        "seconds": parts,
        "ratio": totals["A96"] / totals["dense"],
        "ratio_without_optimizer": (totals["A96"] - parts["A96"]["optimizer"]) / (totals["dense"] - parts["dense"]["optimizer"]),
        "weight_bytes": weights,
        "gflops_of_a_product_with_rows": {rows: product_gflops(rows, dtype) for rows in (96, 512, 2048)},
        "seconds_to_pass_over_the_optimizers_bytes": {n: copy_seconds(ADAMW_ACCESSES * size) for n, size in weights.items()},
    }


def main() -> int:
    torch.manual_seed(0)
    results = [measure("bf16", torch.bfloat16), measure("fp32", torch.float32)]
    facts = {"command": f"GOMP_SPINCOUNT={SPIN_COUNT} python -m bench.step_parts", "date": datetime.date.today().isoformat()}
    path = record.RECORDS / f"{facts['date']}-cpu-step-parts.json"
    whole = {**facts, "commit": record.commit(), "machine": record.machine(), "rounds": ROUNDS, "results": results}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print(json.dumps(result, indent=1))
    print(f"bench: wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
