"""A warning when an expert keeps getting far more than its share: routing that collapses shows in the load long before it shows in the
loss."""

from __future__ import annotations

import sys

from moe_train.train.callbacks import Callback, Record

PATIENCE = 20
"""Steps in a row above the threshold before the warning: the first steps of a run are often unbalanced."""


class LoadAlarm(Callback):
    """threshold: balance.alarm_max_vio. Warns once a layer's MaxVio was above it for PATIENCE steps; again only after the layer had
    recovered."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._above: dict[int, int] = {}

    def on_step(self, record: Record) -> None:
        for index, max_vio in enumerate(record.get("max_vio_per_layer", [])):
            self._above[index] = self._above.get(index, 0) + 1 if max_vio > self.threshold else 0
            if self._above[index] == PATIENCE:
                print(
                    f"warning: step {record['step']}: in MoE layer {index} the fullest expert has had more than "
                    f"{1 + self.threshold:g} × the mean load for {PATIENCE} steps (MaxVio {max_vio:.2f}, "
                    f"balance.alarm_max_vio={self.threshold:g}). "
                    "Balancing is off or too weak: see balance.bias, balance.bias_rate and the auxiliary losses.",
                    file=sys.stderr,
                    flush=True,
                )
