"""run.dir/metrics.jsonl (every logged step) and run.dir/loads.jsonl (a sample of the expert loads, for the report's heatmap).

One JSON object a line, flushed each line. On resume, lines after the checkpoint's step and a line torn by a killed process are dropped,
so that the file reads as if the run had never stopped. Numbers that are not finite become null (JSON has no NaN).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_train.train.callbacks import Callback, Record

if TYPE_CHECKING:
    from moe_train.train.trainer import Trainer

METRICS, LOADS = "metrics.jsonl", "loads.jsonl"
LOAD_SAMPLES = 200
"""About how many steps of a run keep their expert loads."""


class JsonLines:
    """An append-only file of records that have a `step`."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [json.dumps(record) + "\n" for record in read_records(path) if record["step"] <= resumed_step]
        half = path.with_name(f".tmp-{path.name}")
        half.write_text("".join(kept), encoding="utf-8")
        os.replace(half, path)

    def append(self, record: Record) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record)) + "\n")


class MetricsWriter(Callback):
    """Writes both files. every: log.every; the last step and steps with an evaluation are always written."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.metrics = JsonLines(trainer.run_dir / METRICS, trainer.resumed_step)
        self.loads = JsonLines(trainer.run_dir / LOADS, trainer.resumed_step)
        self.load_every = max(1, trainer.config.train.steps // LOAD_SAMPLES)

    def on_step(self, record: Record) -> None:
        step, last = record["step"], record["step"] == self.trainer.config.train.steps
        if step % self.every == 0 or last or "eval_loss" in record:
            self.metrics.append(record)
        if step % self.load_every == 0 or last:
            load = self.trainer.recorder.load
            self.loads.append({"step": step, "load": {str(layer): load[layer].tolist() for layer in sorted(load)}})


def read_records(path: Path) -> list[Record]:
    """The whole lines of a file (none where it does not exist); a torn or foreign line is left out."""
    records = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def finite(value: Any) -> Any:
    """The same value with NaN and infinities as None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
