"""How long OpenMP threads wait for the next operation before they sleep."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "3000"
"""Some ten microseconds: longer than the time between two operations of a step, shorter than anything another process would miss. By
default libgomp spins for milliseconds, which made a step several times slower as soon as another process wanted one of two cores; sleeping
at once (OMP_WAIT_POLICY=PASSIVE) costs a step a third of its speed when none does (docs/log.md)."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Set GOMP_SPINCOUNT where the user has set neither it nor OMP_WAIT_POLICY. Works before torch is imported only."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
