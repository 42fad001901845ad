"""The one place that imports megatron-core: lazily (it takes 2.5 s on a CPU) and quietly (it warns about Transformer Engine and Apex)."""

from __future__ import annotations

import logging
import warnings
from functools import cache
from types import ModuleType


@cache
def indexed_dataset() -> ModuleType:
    """`megatron.core.datasets.indexed_dataset`: IndexedDataset, IndexedDatasetBuilder, DType."""
    with warnings.catch_warnings():
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
