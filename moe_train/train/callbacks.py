"""What may watch a run: small objects that the Trainer calls, in the order of its list. None of them can change what is trained.

`record` is one optimizer step as a plain dictionary (step, loss, grad_norm, lr, tokens, …; the keys are listed in `step_record`). On a
step with an evaluation it also holds eval_loss and bits_per_byte, and `on_evaluate` is called just before `on_step`. A callback may add
keys to the record for those behind it (utilisation, for one). Beside the record, `trainer` offers: config, run_dir, model, device, step,
resumed_step (0 for a new run), tokenizer, bytes_per_token, flops_per_token, and recorder (of the last step: load per layer).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_train.train.trainer import Trainer

Record = dict[str, Any]


class Callback:
    """Overwrite what you need."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step; the model is built and, when resuming, loaded."""

    def on_step(self, record: Record) -> None:
        """After each optimizer step, skipped ones included."""

    def on_evaluate(self, record: Record) -> None:
        """After an evaluation, with the step's whole record."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is durable at `path`."""

    def on_end(self, trainer: Trainer, status: str) -> None:
        """status: 'finished', 'stopped' (a signal; the run can be resumed) or 'failed' (an exception is on its way up)."""


class MetricLines(Callback):
    """Appends each record to run.dir/metrics.jsonl and prints a short line. On resume, lines after the checkpoint's step are dropped."""

    def on_start(self, trainer: Trainer) -> None:
        self.path = trainer.run_dir / "metrics.jsonl"
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= trainer.resumed_step]
        self.path.write_text("".join(kept))

    def on_step(self, record: Record) -> None:
        clean = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")
        print(f"step {record['step']}: loss {record['loss']:.4f}, {record['tokens_per_s']:,.0f} tokens/s", flush=True)
