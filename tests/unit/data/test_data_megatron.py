"""Importing megatron-core for its data files leaves the process as it was."""

from __future__ import annotations

import subprocess
import sys

SIDE_EFFECTS = """
import logging, random, signal, sys
import numpy, torch
def look():
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    logs = (len(logging.getLogger().handlers), logging.getLogger().level)
    generators = (torch.get_rng_state().sum().item(), random.getstate(), numpy.random.get_state()[1].sum())
    settings = (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    return signals, logs, generators, settings, sys.stdout.write
before = look()
from moe_train.data import megatron
assert "megatron" not in sys.modules
megatron.helpers()
after = look()
assert before == after, (before, after)
assert "wandb" not in sys.modules
"""


def test_import_is_lazy_and_quiet_and_changes_nothing_outside() -> None:
    done = subprocess.run([sys.executable, "-W", "default", "-c", SIDE_EFFECTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "megatron" not in done.stderr
    assert "Transformer Engine" not in done.stderr + done.stdout


def test_worker_modules_import_neither_torch_nor_megatron() -> None:
    code = "import sys; from moe_train.data import tokenize; assert not {'torch', 'megatron', 'datasets', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
