"""What this machine's matrix units reach: the yardstick of `utilisation` is measured, not taken from a data sheet."""

from __future__ import annotations

import time
from functools import cache

import torch

SIZE = 2048
SECONDS = 0.3


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of the square matmuls (SIZE on a CPU, 4 × SIZE on an accelerator) that fit into about SECONDS. Measured
    once a process."""
    size = SIZE if device.type == "cpu" else 4 * SIZE
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    _synchronise(device)
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        _synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
