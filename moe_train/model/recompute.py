"""Activation recompute that replays the routing (law: recompute never routes again).

A recomputed forward pass could choose other experts than the first one (jitter, a tie, another kernel), so its shapes and gradients would
not fit. Each checkpointed region owns a `RoutingTape`: the first pass records the chosen experts, the recomputed pass plays them back in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class RoutingTape:
    """Expert choices of one region in call order."""

    def __init__(self) -> None:
        self.choices: list[Tensor] = []
        self.replaying = False
        self._next = 0

    @contextmanager
    def record(self) -> Iterator[None]:
        with _activate(self):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        self.replaying, self._next = True, 0
        with _activate(self):
            yield

    def route(self, choose: Callable[[], Tensor]) -> Tensor:
        if self.replaying:
            choice = self.choices[self._next]
            self._next += 1
            return choice
        choice = choose()
        self.choices.append(choice)
        return choice


_tape: ContextVar[RoutingTape | None] = ContextVar("routing_tape", default=None)


@contextmanager
def _activate(tape: RoutingTape) -> Iterator[None]:
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


def routed(choose: Callable[[], Tensor]) -> Tensor:
    """What `choose()` decides (experts, counts, choices kept), recorded or played back when inside a recomputed region. The router calls
    this and nothing else."""
    tape = _tape.get()
    return choose() if tape is None else tape.route(choose)


def is_replay() -> bool:
    """True in a recomputed pass: nothing is counted or recorded there."""
    tape = _tape.get()
    return tape is not None and tape.replaying


@torch.compiler.disable(recursive=False)  # torch.compile cannot trace the tape; what runs inside is compiled part by part
def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) whose activations are dropped and computed again in backward."""
    tape = RoutingTape()
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (tape.record(), tape.replay()))
