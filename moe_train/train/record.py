"""The dictionary of one step that callbacks and metrics.jsonl get."""

from __future__ import annotations

from moe_train.model.balancing import load_metrics
from moe_train.train.callbacks import Record
from moe_train.train.step import StepResult


def step_record(result: StepResult, tokens: int, skipped: int, global_batch: int) -> Record:
    """step counts from 1 here: `step: 8` is the state after 8 steps, the name of its checkpoint.

    loss is the LM loss alone; mtp_loss the mean over MTP depths; each balancing loss apart, the mean over layers before its coefficient
    (1 is balanced for the auxiliary ones); tokens: all tokens of the run so far; skipped: steps skipped so far; dropped: token copies
    dropped by capacity this step.
    """
    record: Record = {
        "step": result.step + 1,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": tokens,
        "global_batch": global_batch,
    }
    if result.mtp_losses:
        record["mtp_loss"] = sum(result.mtp_losses) / len(result.mtp_losses)
    for name, layers in result.recorder.losses.items():
        record[name] = sum(float(value) for value in layers.values()) / len(layers)
    if result.recorder.load:
        record |= load_metrics(result.recorder.load)
    if result.recorder.dropped:
        record["dropped"] = sum(int(value) for value in result.recorder.dropped.values())
    if result.recorder.want_qk_max:
        record["qk_max"] = max((float(value.max()) for value in result.recorder.qk_max.values()), default=0.0)
        record["clipped_heads"] = result.clipped_heads
    record["skipped"] = skipped
    return record
