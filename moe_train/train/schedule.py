"""Learning rate and batch size as pure functions of the step, so that resuming needs the step alone.

Steps count from 0: step s is the s-th optimizer step, the one after s steps were done.
"""

from __future__ import annotations

import math

from moe_train.config import ConfigError, ScheduleConfig, TrainConfig


def lr_factor(step: int, config: ScheduleConfig, total_steps: int) -> float:
    """What the peak rate is multiplied by at `step`; in [min_lr_ratio, 1] after the warm-up.

    Warm-up: linear, (s + 1) / warmup_steps. Then
    cosine: min + (1 − min)/2 · (1 + cos(π·p)), p from 0 at the end of the warm-up to 1 at `decay_steps` (None: total_steps), the minimum
    after it; wsd: 1, then linear to min over the last `decay_steps` (None: a tenth of total_steps) (MiniCPM, arXiv:2404.06395);
    constant: 1.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    low = config.min_lr_ratio
    if config.name == "cosine":
        end = cosine_end(config, total_steps)
        progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
        return low + (1 - low) / 2 * (1 + math.cos(math.pi * progress))
    if config.name == "wsd":
        length = wsd_length(config, total_steps)
        return 1 - (1 - low) * min(1.0, max(0, step - (total_steps - length)) / length)
    return 1.0


def cosine_end(config: ScheduleConfig, total_steps: int) -> int:
    return total_steps if config.decay_steps is None else config.decay_steps


def wsd_length(config: ScheduleConfig, total_steps: int) -> int:
    """Steps of the final decay, at least 1."""
    return max(1, total_steps // 10 if config.decay_steps is None else config.decay_steps)


def decay_span(config: ScheduleConfig, total_steps: int) -> tuple[int, int] | None:
    """First and last step of the decay (None: it never decays). Resuming with another span is worth a warning."""
    if config.name == "cosine":
        return config.warmup_steps, cosine_end(config, total_steps)
    if config.name == "wsd":
        return total_steps - wsd_length(config, total_steps), total_steps
    return None


class BatchSchedule:
    """Sequences of each step's global batch.

    With a ramp, `levels` equal increments lie between start and train.global_batch, and step s < ramp steps has start + ⌊s · levels /
    steps⌋ · increment sequences; afterwards global_batch.
    """

    def __init__(self, config: TrainConfig) -> None:
        ramp = config.batch_ramp
        self.full = config.global_batch
        self.start = self.full if ramp.start is None else ramp.start
        self.increment, self.steps = ramp.increment, (0 if ramp.start is None else ramp.steps)
        if self.full < 1:
            raise ConfigError(f"train.global_batch={self.full} must be at least 1.")
        if ramp.start is None:
            self.levels = 0
            return
        if not 1 <= self.start <= self.full or self.increment < 1 or (self.full - self.start) % self.increment:
            span = self.full - self.start
            way_out = (
                f"choose a start of at least 1 and an increment that divides {span}"
                if span >= 0
                else "choose 1 <= start <= train.global_batch"
            )
            raise ConfigError(
                f"train.batch_ramp: from start={self.start} the batch cannot grow to train.global_batch={self.full} in steps of "
                f"increment={self.increment}; {way_out}, or do without a ramp (train.batch_ramp={{start: null, increment: 1, steps: 0}})."
            )
        if self.steps < 1:
            raise ConfigError(f"train.batch_ramp.steps={self.steps} must be at least 1 when train.batch_ramp.start is set.")
        self.levels = (self.full - self.start) // self.increment

    def size(self, step: int) -> int:
        """Sequences of step `step`."""
        if step >= self.steps:
            return self.full
        return self.start + step * self.levels // self.steps * self.increment

    def consumed(self, step: int) -> int:
        """Sequences of all steps before `step`: Σ_{s<step} size(s), in a sum over the levels instead of the steps."""
        ramped = min(step, self.steps)
        # Level l >= 1 is reached from step ⌈l · steps / levels⌉ on and adds one increment to each step after that.
        extra = sum(max(0, ramped - -(-level * self.steps // self.levels)) for level in range(1, self.levels + 1))
        return ramped * self.start + extra * self.increment + (step - ramped) * self.full
