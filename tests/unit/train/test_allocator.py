"""Freed memory serves the next step: the kernel hands out next to no new pages once the first steps are done."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, torch
from moe_train.train.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        weights = [torch.ones(size * 2**20, dtype=torch.uint8) for size in (48, 16, 40, 8)]
        del weights
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
usual = faults()
assert keep_freed_memory()
faults()
print(usual, faults())
"""


def test_later_steps_take_next_to_no_new_pages() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    usual, kept = map(int, result.stdout.split())
    assert usual > 100_000
    assert kept < usual / 20
