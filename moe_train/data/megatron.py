"""The one place that imports megatron-core: lazily (it takes 2 s on a CPU) and quietly.

Left alone the import warns about Transformer Engine and Apex, and where W&B is installed it imports that too, which replaces
sys.stdout.write for the rest of the process.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType


@contextmanager
def _without_wandb() -> Iterator[None]:
    """Inside, `import wandb` fails as if it were not installed (megatron-core allows for that). W&B imported before or after works."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]


@cache
def indexed_dataset() -> ModuleType:
    """`megatron.core.datasets.indexed_dataset`: IndexedDataset, IndexedDatasetBuilder, DType."""
    with warnings.catch_warnings(), _without_wandb():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset as module
    logging.getLogger(module.__name__).setLevel(logging.WARNING)
    return module


@cache
def helpers() -> ModuleType:
    """`megatron.core.datasets.helpers`: build_sample_idx, build_blending_indices, build_exhaustive_blending_indices (C++)."""
    indexed_dataset()
    from megatron.core.datasets import helpers as module

    return module
