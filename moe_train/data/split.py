"""Train, validation and test as contiguous ranges of documents, so that no document lies in two of them."""

from __future__ import annotations

import math

import numpy as np

from moe_train.config import ConfigError

SPLITS = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Weights of train, valid and test, normalised to sum 1. '98,2,0' and '98,2' mean the same."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"data.split={text!r} is not up to three numbers for train, valid and test; write for example 98,2,0.") from None
    if not 1 <= len(weights) <= 3:
        raise ConfigError(f"data.split={text!r} has {len(weights)} weights; give one to three: train, valid, test (for example 98,2,0).")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ConfigError(f"data.split={text!r} must hold weights >= 0 with a sum above 0 (for example 98,2,0).")
    train, valid, test = (weight / sum(weights) for weight in (*weights, 0.0, 0.0, 0.0)[:3])
    return train, valid, test


def split_documents(document_sizes: np.ndarray, split: str) -> dict[str, range]:
    """Documents of each split. A boundary is the document border nearest to the wanted share of tokens; a split with a weight gets at least
    one document as long as there are enough of them.

    document_sizes: tokens of each document [documents].
    """
    shares = parse_split(split)
    ends = np.cumsum(document_sizes, dtype=np.int64)
    num_documents = len(ends)
    ranges, start, reached = {}, 0, 0.0
    for index, name in enumerate(SPLITS):
        reached += shares[index]
        later = sum(share > 0 for share in shares[index + 1 :])
        if shares[index] == 0:
            stop = start
        elif later == 0:
            stop = num_documents
        else:
            stop = _nearest_border(ends, reached * int(ends[-1]))
            # Earlier splits come first where documents are too few for all.
            stop = min(max(stop, start + 1), max(start + 1, num_documents - later), num_documents)
        ranges[name] = range(start, stop)
        start = stop
    return ranges


def _nearest_border(ends: np.ndarray, wanted: float) -> int:
    """Number of documents whose tokens come nearest to `wanted`."""
    after = int(np.searchsorted(ends, wanted))
    if after >= len(ends):
        return len(ends)
    before = int(ends[after - 1]) if after > 0 else 0
    return after if wanted - before <= int(ends[after]) - wanted else after + 1
