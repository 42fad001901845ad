"""Freed memory serves the next step: no page is taken from the kernel twice."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, torch
from moe_train.train.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
torch.set_num_threads(1)
first = [faults() for _ in range(3)][-1]
assert keep_freed_memory()
print(first, [faults() for _ in range(3)][-1])
"""


def test_second_allocation_takes_no_new_pages() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert before > 1000
    assert after < before / 100
