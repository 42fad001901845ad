"""What may watch a run: small objects that the Trainer calls, in the order of its list. None of them can change what is trained.

`record` is one optimizer step as a plain dictionary (step, loss, grad_norm, lr, tokens, …; the keys are listed in `step_record`). On a
step with an evaluation it also holds eval_loss and bits_per_byte, and `on_evaluate` is called just before `on_step`. A callback may add
keys to the record for those behind it (utilisation, for one). Beside the record, `trainer` offers: config, run_dir, model, device, step,
resumed_step (0 for a new run), tokenizer, bytes_per_token, flops_per_token, and recorder (of the last step: load per layer).
"""

from __future__ import annotations

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
