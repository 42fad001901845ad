"""One optimizer step: micro-batches forward and backward, one norm, one clip, one update, one balancer update.

Law: the same global batch gives the same loss, gradient norm and weights for every micro-batch size and recompute setting. Every sum is
divided by the token counts of the global batch, known before the first micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from moe_train.config import Config
from moe_train.model.balancing import update_biases
from moe_train.model.batch import Batch, Denominators, Recorder
from moe_train.model.init import tensor_seed
from moe_train.model.transformer import Transformer
from moe_train.optim import Optimizer, global_norm, qk_clip
from moe_train.train.precision import Weights
from moe_train.train.schedule import lr_factor


@dataclass
class StepResult:
    """loss: LM loss a token (no MTP, no balancing); grad_norm before the clip; skipped: the update was left out, nothing changed."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    denominators: Denominators
    recorder: Recorder
    mtp_losses: list[float] = field(default_factory=list)
    clipped_heads: int = 0


class TrainStep:
    """Calls: `result = train_step(batch, step)` with the whole global batch of this rank."""

    def __init__(self, model: Transformer, weights: Weights, optimizer: Optimizer, config: Config, device: torch.device) -> None:
        self.model, self.weights, self.optimizer, self.config, self.device = model, weights, optimizer, config, device

    def __call__(self, batch: Batch, step: int) -> StepResult:
        config, depth = self.config, self.model.config.mtp.depth
        # The random state is a function of (seed, step) alone, so that nothing that ran before (evaluation, resuming) can change it.
        torch.manual_seed(tensor_seed(config.seed, f"step {step}"))
        self.model.train()
        counts = Denominators.of(batch, depth)
        micro_batches = [part.to(self.device) for part in batch.split(config.train.micro_batch)]
        recorder = Recorder(want_qk_max=config.optim.name == "muonclip")
        global_load = self._global_load(micro_batches, counts)
        self.weights.begin(len(micro_batches))
        sums = torch.zeros(1 + depth, dtype=torch.float64, device=self.device)
        for part in micro_batches:
            output = self.model(part, counts, recorder, global_load)
            output.loss.backward()
            sums += torch.stack([output.lm_sum, *output.mtp_sums])
        gradients = self.weights.gradients()
        norm = float(global_norm(list(gradients.values())))
        loss, *mtp_losses = (total / max(count, 1) for total, count in zip(sums.tolist(), [counts.labels, *counts.mtp], strict=True))
        factor = lr_factor(step, config.optim.schedule, config.train.steps)
        result = StepResult(
            step, loss, norm, self.optimizer.lr * factor, not (math.isfinite(loss) and math.isfinite(norm)), counts, recorder, mtp_losses
        )
        if not result.skipped:
            clip = config.train.grad_clip
            self.optimizer.step(gradients, factor, min(1.0, clip / norm) if clip > 0 and norm > 0 else 1.0)
            if recorder.want_qk_max:
                assert recorder.qk_max, "the attention layers recorded no largest logits"
                result.clipped_heads = qk_clip(self.model, self.weights.master, recorder.qk_max, config.optim.qk_clip_tau)
            self.weights.publish()
            update_biases(self.model, recorder, config.balance)
        return result

    def _global_load(self, micro_batches: list[Batch], counts: Denominators) -> dict[int, torch.Tensor] | None:
        """Load of the whole batch per layer, by a pass without gradients under the same random state, when the global-batch loss needs
        it."""
        balance = self.config.balance
        if not balance.global_aux_coef or balance.global_counts != "exact" or len(micro_batches) == 1:
            return None
        recorder = Recorder()
        with torch.no_grad(), same_random_state(self.device):
            for part in micro_batches:
                self.model(part, counts, recorder)
        return recorder.load


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Put the random state back at the end, as if the block had drawn nothing."""
    with torch.random.fork_rng(
        devices=[] if device.type == "cpu" else [device.index or 0], device_type="cuda" if device.type == "cpu" else device.type
    ):
        yield
