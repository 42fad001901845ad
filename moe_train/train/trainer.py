"""The training loop: `for step: batch -> TrainStep -> record -> callbacks`, with evaluation, checkpoints and stop signals at step
boundaries."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_train.config import Config, RunError
from moe_train.model.batch import Recorder
from moe_train.model.transformer import Transformer
from moe_train.optim import Optimizer
from moe_train.train.callbacks import Callback, Record
from moe_train.train.checkpoint import Snapshot
from moe_train.train.evaluate import Evaluation, evaluate
from moe_train.train.precision import Weights
from moe_train.train.record import step_record
from moe_train.train.restore import model_tensors, optimizer_tensors
from moe_train.train.run_dir import CONFIG, TOKENIZER, RunDir, config_yaml
from moe_train.train.saver import Saver
from moe_train.train.schedule import BatchSchedule
from moe_train.train.signals import StopSignal
from moe_train.train.step import StepResult, TrainStep

if TYPE_CHECKING:
    from moe_train.data import SampleStream


@dataclass
class Progress:
    """The integers that, with the tensors, make a run's state. step: optimizer steps done, skipped ones included."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


class Trainer:
    """Owns the loop. Callbacks may read every public attribute (see `callbacks`)."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        model: Transformer,
        weights: Weights,
        optimizer: Optimizer,
        train_stream: SampleStream,
        valid_stream: SampleStream | None,
        device: torch.device,
        progress: Progress,
        flops_per_token: float,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.run_dir, self.model, self.weights, self.optimizer = config, run_dir.path, model, weights, optimizer
        self.train_stream, self.valid_stream, self.device, self.progress = train_stream, valid_stream, device, progress
        self.flops_per_token, self.callbacks = flops_per_token, list(callbacks)
        self.resumed_step = progress.step
        self.tokenizer = train_stream.tokenizer
        self.batches = BatchSchedule(config.train)
        self.recorder = Recorder()
        self.train_step = TrainStep(model, weights, optimizer, config, device)
        self.saver = Saver(run_dir.checkpoints, config.train.keep_checkpoints, config.train.async_checkpoint, self._checkpoint_done)

    @property
    def step(self) -> int:
        return self.progress.step

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Of the validation split, measured once."""
        return None if self.valid_stream is None else self.valid_stream.bytes_per_token

    def run(self) -> int:
        """Train to train.steps or to a stop signal. Returns the exit code: 0, or 130 after Ctrl-C. RunError when the run failed."""
        status = "failed"
        try:
            with StopSignal() as stop:
                self._call("on_start", self)
                if self.step >= self.config.train.steps:
                    print(
                        f"step {self.step} of train.steps={self.config.train.steps} is done already; raise train.steps to go on.",
                        file=sys.stderr,
                    )
                while self.step < self.config.train.steps and not stop.requested:
                    self._one_step(stop)
                if self.step > self.resumed_step:
                    self.saver.save_last(self._snapshot())
                self.saver.wait()
                status = "finished" if self.step >= self.config.train.steps else "stopped"
                if stop.received is not None:
                    print(f"{stop.received.name}: saved step {self.step}; the same command continues from there.", file=sys.stderr)
                return stop.exit_code
        finally:
            self.saver.close()
            self._call("on_end", self, status)

    def _one_step(self, stop: StopSignal) -> None:
        started = time.perf_counter()
        batch = self.train_stream.batch(self.batches.consumed(self.step), self.batches.size(self.step))
        result = self.train_step(batch, self.step)
        seconds = time.perf_counter() - started
        self.recorder = result.recorder
        self.progress.step += 1
        self.progress.tokens += result.denominators.tokens
        self._count_skipped(result)
        record = step_record(result, self.progress.tokens, self.progress.skipped, len(batch))
        record["tokens_per_step"] = result.denominators.tokens
        record["tokens_per_s"] = result.denominators.tokens / seconds
        record["model_flops_per_s"] = record["tokens_per_s"] * self.flops_per_token
        if self._due(self.config.train.eval_every):
            evaluation = self._evaluate(stop)
            if evaluation is not None:
                record |= {"eval_loss": evaluation.loss, "bits_per_byte": evaluation.bits_per_byte}
                self._call("on_evaluate", record)
        self._call("on_step", record)
        self.saver.poll()
        if self._due(self.config.train.checkpoint_every) and self.step < self.config.train.steps:
            self.saver.save(self._snapshot())

    def _due(self, every: int) -> bool:
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _evaluate(self, stop: StopSignal) -> Evaluation | None:
        if self.valid_stream is None or self.bytes_per_token is None:
            return None
        count = min(self.config.train.eval_sequences, self.valid_stream.num_sequences)
        return evaluate(
            self.model,
            self.valid_stream.batch,
            count,
            self.config.train.micro_batch,
            self.bytes_per_token,
            self.device,
            lambda: stop.requested,
        )

    def _count_skipped(self, result: StepResult) -> None:
        progress, limit = self.progress, self.config.train.max_skipped_steps
        if not result.skipped:
            progress.skipped_in_a_row = 0
            return
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        what = f"step {self.step}: loss {result.loss}, gradient norm {result.grad_norm}"
        if progress.skipped_in_a_row >= max(1, limit):
            raise RunError(
                f"{what}: {progress.skipped_in_a_row} steps in a row were not finite (train.max_skipped_steps={limit}). "
                "The weights are those of the last finite step. Lower optim.lr, lengthen the warm-up, "
                "or resume from an older checkpoint with run.resume=PATH."
            )
        print(
            f"warning: {what}: skipped, weights unchanged ({progress.skipped_in_a_row} in a row, limit {limit}).",
            file=sys.stderr,
            flush=True,
        )

    def _snapshot(self) -> Snapshot:
        tokenizer = self.run_dir / TOKENIZER
        texts = {CONFIG: config_yaml(self.config)}
        if tokenizer.is_file():
            texts[TOKENIZER] = tokenizer.read_bytes()
        state = asdict(self.progress) | {
            "consumed_sequences": self.batches.consumed(self.step),
            "optimizer_updates": self.optimizer.updates,
            # Every step seeds its own random state from these two, so there is none to carry over.
            "random": {"seed": self.config.seed, "step": self.step},
            "data": self.train_stream.state(),
            "versions": {"torch": torch.__version__},
        }
        tensors = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.weights, self.optimizer)}
        return Snapshot(self.step, tensors, state, texts)

    def _checkpoint_done(self, path: Path) -> None:
        self._call("on_checkpoint", path)

    def _call(self, event: str, *args: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*args)


__all__ = ["Progress", "Record", "Trainer"]
