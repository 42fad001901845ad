"""`python -m bench.openmp`: how idle OpenMP threads should wait, as training steps of A; writes bench/records/DATE-cpu-openmp.json.

Each way of waiting takes turns with the one that `moe-train` sets (moe_train/cli/openmp.py), on the machine as it is and beside a process
that keeps one core busy.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench import record
from bench.compare import OURS, compare_ours
from moe_train.cli.openmp import SPIN_COUNT

WAYS: dict[str, tuple[tuple[str, str], ...]] = {
    "the default": (),
    "OMP_WAIT_POLICY=PASSIVE": (("OMP_WAIT_POLICY", "PASSIVE"),),
    "GOMP_SPINCOUNT=30000": (("GOMP_SPINCOUNT", "30000"),),
}
ROUNDS = 6


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that do nothing, as fast as they can."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    results: list[dict[str, Any]] = []
    for busy in (0, 1):
        for precision in ("bf16", "fp32"):
            for name, environment in WAYS.items():
                with neighbours(busy):
                    other = replace(OURS, name=name, environment=environment)
                    pair = compare_ours(("A", OURS), ("A", other), precision, ROUNDS)
                result = {
                    "busy_neighbours": busy,
                    "precision": precision,
                    "way": name,
                    "its_time_over_ours": statistics.median(pair.ratios),
                }
                result |= {"ratios": pair.ratios, "seconds_ours": pair.seconds_ours, "seconds_its": pair.seconds_theirs}
                results.append(result)
                print(f"bench: {busy} busy, {precision}, {name}: {result['its_time_over_ours']:.2f}", file=sys.stderr, flush=True)
    facts = {"command": "python -m bench.openmp", "date": datetime.date.today().isoformat(), "commit": record.commit()}
    path = record.RECORDS / f"{facts['date']}-cpu-openmp.json"
    whole = {**facts, "machine": record.machine(), "ours": f"GOMP_SPINCOUNT={SPIN_COUNT}", "results": results}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
