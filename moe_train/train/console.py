"""What a person sees: a progress bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from moe_train.train.callbacks import Callback, Record
from moe_train.train.peak import matmul_peak

if TYPE_CHECKING:
    from rich.progress import Progress

    from moe_train.train.trainer import Trainer

SECONDS = 1.0
"""Plain lines come at most this often; the first step, the last one and evaluations always have one."""
SMOOTHING = 0.8


class Utilisation(Callback):
    """Adds `utilisation` to the record: model FLOP/s over the measured matmul peak of the device in the run's precision."""

    def on_start(self, trainer: Trainer) -> None:
        self.peak = matmul_peak(trainer.device, trainer.weights.dtype)

    def on_step(self, record: Record) -> None:
        record["utilisation"] = record["model_flops_per_s"] / self.peak


class Console(Callback):
    """Loss, tokens/s, model FLOP/s and utilisation, MaxVio, time left."""

    progress: Progress | None = None

    def on_start(self, trainer: Trainer) -> None:
        self.steps, self.shown_at = trainer.config.train.steps, 0.0
        self.rate: float | None = None
        print(f"{trainer.run_dir}: {describe(trainer)}", flush=True)
        if sys.stdout.isatty():
            from rich import progress

            columns: list[Any] = [progress.TextColumn("step {task.completed}/{task.total}"), progress.BarColumn(), "{task.fields[text]}"]
            self.progress = progress.Progress(*columns, progress.TimeRemainingColumn())
            self.task = self.progress.add_task("train", total=self.steps, completed=trainer.resumed_step, text="")
            self.progress.start()

    def on_step(self, record: Record) -> None:
        self.rate = smoothed(self.rate, record["tokens_per_s"])
        text = line(record, self.rate)
        if self.progress is not None:
            self.progress.update(self.task, completed=record["step"], text=text)
            if "eval_loss" in record:
                self.progress.print(f"step {record['step']} {text}")
            return
        now = time.monotonic()
        if now - self.shown_at >= SECONDS or record["step"] in (1, self.steps) or "eval_loss" in record:
            self.shown_at = now
            seconds = (self.steps - record["step"]) * record["tokens_per_step"] / self.rate
            print(f"step {record['step']}/{self.steps} {text} · {clock(seconds)} left", flush=True)

    def on_end(self, trainer: Trainer, status: str) -> None:
        if self.progress is not None:
            self.progress.stop()
        if status != "failed":
            print(f"{status} at step {trainer.step}: {trainer.run_dir}", flush=True)


def smoothed(rate: float | None, value: float) -> float:
    return value if rate is None else SMOOTHING * rate + (1 - SMOOTHING) * value


def line(record: Record, tokens_per_s: float) -> str:
    """One step in words."""
    parts = [f"loss {record['loss']:.4f}"]
    if "eval_loss" in record:
        parts.append(f"valid {record['eval_loss']:.4f} ({record['bits_per_byte']:.4f} bits/byte)")
    parts += [f"{tokens_per_s:,.0f} tokens/s", f"{record['model_flops_per_s'] / 1e9:,.0f} GFLOP/s"]
    if "utilisation" in record:
        parts[-1] += f" ({record['utilisation']:.0%} of the matmul peak)"
    if "max_vio" in record:
        parts.append(f"MaxVio {record['max_vio']:.3f}")
    return " · ".join(parts)


def describe(trainer: Trainer) -> str:
    """What is about to be trained."""
    config = trainer.config
    count = sum(p.numel() for p in trainer.model.parameters())
    resumed = f", from step {trainer.resumed_step}" if trainer.resumed_step else ""
    return (
        f"{config.model.name} with {count / 1e6:.1f} M parameters, {config.train.steps} steps of {config.train.global_batch} × "
        f"{config.data.seq_len} tokens, {config.train.precision} on {trainer.device}{resumed}"
    )


def clock(seconds: float) -> str:
    """h:mm:ss"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
