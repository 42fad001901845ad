"""Which data set the row number n comes from: rounds of fixed length, so that the answer needs no history.

Inside a round the order is megatron-core's (`build_blending_indices`: always the data set that is furthest behind its weight;
`build_exhaustive_blending_indices` for a blend by size). Every round is the same, so after any whole number of rounds the counts are exact:
data set d gave rounds × counts[d] rows.
"""

from __future__ import annotations

import math

import numpy as np

from moe_train.config import ConfigError
from moe_train.data import megatron

ROUND = 1 << 16
"""Rows of a round of a weighted blend: shares are exact to 1/65536."""
MOST_DATA_SETS = 32_766


def check_weights(weights: list[float] | None, paths: list[str]) -> None:
    """Raise ConfigError unless there is one finite weight >= 0 for each path and not all are zero."""
    if weights is None:
        return
    if len(weights) != len(paths):
        raise ConfigError(f"data.weights has {len(weights)} numbers for {len(paths)} data.paths; give one weight for each path.")
    for path, weight in zip(paths, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"data.weights: {weight} for {path} is not a weight; give numbers >= 0 (they need not sum to 1).")
    if sum(weights) <= 0:
        raise ConfigError(f"data.weights={weights} sum to zero; at least one must be above 0.")
    for path, weight in zip(paths, weights, strict=True):
        if 0 < weight / sum(weights) < 1 / ROUND:
            share = weight / sum(weights)
            raise ConfigError(
                f"data.weights: {weight} for {path} is a share of {share:.2e}, below the resolution 1/{ROUND}; raise it or set 0."
            )


class Blend:
    """`locate(position)` gives (data set, row number of that data set's own endless stream).

    rows: rows of an epoch of each data set; weights None: every row of every data set once a round, evenly mixed.
    """

    def __init__(self, rows: list[int], weights: list[float] | None):
        helpers = megatron.helpers()
        if weights is None:
            self.length = sum(rows)
        else:
            self.length = ROUND
        self._source = np.zeros(self.length, dtype=np.int16)
        self._row = np.zeros(self.length, dtype=np.int64)
        if weights is None:
            used = [index for index, count in enumerate(rows) if count > 0]
            helpers.build_exhaustive_blending_indices(self._source, self._row, np.array([rows[i] for i in used], dtype=np.int64), len(used))
        else:
            used = [index for index, weight in enumerate(weights) if weight > 0]
            shares = np.array([weights[i] for i in used], dtype=np.float64)
            helpers.build_blending_indices(self._source, self._row, shares / shares.sum(), len(used), self.length, False)
        self._used = used
        counted = np.bincount(self._source, minlength=len(used))
        self.counts = [0] * len(rows)
        for index, count in zip(used, counted.tolist(), strict=True):
            self.counts[index] = count
        self.rows = rows

    def locate(self, position: int) -> tuple[int, int]:
        round_, index = divmod(position, self.length)
        source = self._used[int(self._source[index])]
        return source, round_ * self.counts[source] + int(self._row[index])

    def rows_without_repetition(self) -> int:
        """Length of the longest prefix in which no row of any data set comes twice."""
        return min(self._position_of(local, self.rows[source]) for local, source in enumerate(self._used))

    def _position_of(self, local: int, row: int) -> int:
        """Position at which the used data set `local` gives its row number `row`."""
        rounds, rest = divmod(row, self.counts[self._used[local]])
        return rounds * self.length + int(np.flatnonzero(self._source == local)[rest])
