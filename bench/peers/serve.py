"""The step loop that every participant shares, so that only the model differs. Needs torch and nothing else.

Protocol, one JSON object a line: after building and warming up the process prints {"ready": …}; for each line `step N` it runs N steps
(forward, backward, fused AdamW) and prints {"seconds": […], "loss": …}; for `end` it prints {"peak_bytes": …} and exits. The peak is the
largest resident memory since the model was built (building in fp32 and casting is not a step's matter).
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.shapes import SHAPES, Shape

WARM_UP_STEPS = 2
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Build = Callable[[Shape, torch.dtype, str, bool], tuple[torch.nn.Module, Loss]]
"""(shape, dtype, variant, compile) -> the model and a function (tokens [B, T], labels [B, T]) -> mean loss, differentiable."""


def main(build: Build) -> None:
    """Serve steps until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--precision", choices=DTYPES, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    _limit_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    # Nothing but the protocol goes to stdout: libraries that print there would break it.
    protocol, sys.stdout = sys.stdout, sys.stderr
    model, loss_of = build(shape, DTYPES[args.precision], args.variant, args.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    _reset_peak()
    step = _stepper(shape, optimizer, loss_of)
    begin = time.perf_counter()
    losses = [step()[1] for _ in range(WARM_UP_STEPS)]
    parameters = sum(p.numel() for p in model.parameters())
    _say(protocol, ready=True, parameters=parameters, warm_up_seconds=time.perf_counter() - begin, loss=losses[-1])
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "end":
            _say(protocol, peak_bytes=_peak())
            return
        results = [step() for _ in range(int(arguments[0]))]
        _say(protocol, seconds=[seconds for seconds, _ in results], loss=results[-1][1])


def _stepper(shape: Shape, optimizer: torch.optim.Optimizer, loss_of: Loss) -> Callable[[], tuple[float, float]]:
    generator = torch.Generator().manual_seed(1)

    def step() -> tuple[float, float]:
        rows = torch.randint(0, shape.vocab, (shape.micro_batch, shape.sequence + 1), generator=generator)
        begin = time.perf_counter()
        loss = loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - begin, float(loss.detach())

    return step


def _say(stream: object, **message: object) -> None:
    print(json.dumps(message), file=stream, flush=True)  # type: ignore[call-overload]


def _reset_peak() -> None:
    """Linux: forget the largest resident memory so far."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def _limit_memory() -> None:
    """A participant that asks for more than most of the free memory fails alone instead of bringing the machine down."""
    free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if free:
        limit = int(int(free[1]) * 1024 * 0.8)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
