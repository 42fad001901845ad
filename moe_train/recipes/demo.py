"""What `+experiment=demo` adds after training: the yardstick (a bigram model of the same training tokens) and a sample of text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_train.data.ngram import fit_bigram
from moe_train.data.tokenizer import end_of_text
from moe_train.model.batch import IGNORE
from moe_train.model.sampling import Sampling, generate
from moe_train.recipes.generate import stream_text
from moe_train.train.evaluate import evaluate
from moe_train.train.metrics import METRICS, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moe_train.model.batch import Batch
    from moe_train.train.trainer import Trainer

ROWS_AT_ONCE = 512
LAST_STEPS = 8
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=1)


def after_training(trainer: Trainer) -> None:
    """Print what config.demo asks for, and keep it in run.dir/demo.json."""
    demo = trainer.config.demo
    results: dict[str, float | int | str] = {}
    if demo.bigram:
        results |= compare_with_bigram(trainer)
        results |= balance_at_the_end(trainer)
    if demo.sample is not None:
        trainer.model.eval()
        ids = trainer.tokenizer.encode(demo.sample, add_special_tokens=False).ids
        tokens = generate(trainer.model, ids, demo.sample_tokens, SAMPLING, end_of_text(trainer.tokenizer))
        results["sample"] = demo.sample + "".join(stream_text(trainer.tokenizer, tokens))
        print(f"\nA sample (temperature {SAMPLING.temperature}, top-p {SAMPLING.top_p}):\n{results['sample']}\n")
    if results:
        (Path(trainer.run_dir) / "demo.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compare_with_bigram(trainer: Trainer) -> dict[str, float | int | str]:
    """Bits per byte of the trained model and of a bigram model fitted on the same training tokens, both on the same validation rows."""
    stream = trainer.valid_stream
    if stream is None:
        return {}
    rows = min(trainer.config.train.eval_sequences, stream.num_sequences)
    seen = trainer.batches.consumed(trainer.step)
    train = (trainer.train_stream.batch(start, min(ROWS_AT_ONCE, seen - start)) for start in range(0, seen, ROWS_AT_ONCE))
    bigram = fit_bigram(*pairs(train), trainer.config.model.vocab_size)
    bits = 1 / math.log(2) / stream.bytes_per_token
    baseline = bigram.loss(*pairs([stream.batch(0, rows)])) * bits
    result = evaluate(trainer.model, stream.batch, rows, trainer.config.train.micro_batch, stream.bytes_per_token, trainer.device)
    assert result is not None
    verdict = "below" if result.bits_per_byte < baseline else "NOT below"
    print(
        f"\nBits per byte on {rows} validation sequences ({result.tokens:,} tokens): this model {result.bits_per_byte:.4f}, {verdict} an "
        f"interpolated bigram model of the same {int(bigram.counts.sum()):,} training tokens {baseline:.4f} (Kneser-Ney, discount "
        f"{bigram.discount})."
    )
    return {
        "bits_per_byte": result.bits_per_byte,
        "bigram_bits_per_byte": baseline,
        "bigram_discount": bigram.discount,
        "training_pairs": int(bigram.counts.sum()),
        "validation_tokens": result.tokens,
    }


def balance_at_the_end(trainer: Trainer) -> dict[str, float]:
    """MaxVio of the worst layer over the last steps: one step may be balanced by chance."""
    worst = [r["max_vio"] for r in read_records(Path(trainer.run_dir) / METRICS)[-LAST_STEPS:] if "max_vio" in r]
    if not worst:
        return {}
    mean, largest = sum(worst) / len(worst), max(worst)
    print(f"Load balance: MaxVio of the worst layer over the last {len(worst)} steps: mean {mean:.3f}, largest {largest:.3f}.")
    return {"max_vio_mean": mean, "max_vio_largest": largest, "max_vio_steps": len(worst)}


def pairs(batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Every labelled position as (token, next token) of one document, int64."""
    previous, following = [], []
    for batch in batches:
        labelled = batch.labels_BT != IGNORE
        previous.append(batch.tokens_BT[labelled].numpy())
        following.append(batch.labels_BT[labelled].numpy())
    return np.concatenate(previous), np.concatenate(following)
