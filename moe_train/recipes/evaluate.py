"""`moe-train evaluate`: loss, perplexity and bits per byte of a checkpoint on a split, on prepared data, or on a text file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moe_train.config import Config, ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from moe_train.model.batch import Batch

Rows = tuple["Callable[[int, int], Batch]", int, float, str]
"""batch_of(start, count), number of rows, bytes per token, what it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("path", metavar="RUN_OR_CHECKPOINT", help="a run folder (its newest checkpoint), or one checkpoint folder")
    parser.add_argument("--split", choices=("valid", "test"), help="which part of the data (default: valid)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--data", metavar="PREFIX", help="a .bin/.idx pair made by `moe-train prepare-data` instead of the run's own data")
    other.add_argument("--text", metavar="FILE", help="a UTF-8 text file, all of it")
    parser.add_argument("--sequences", type=int, metavar="N", help="at most N rows (default: all)")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="rows at once (default: 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the result; exit code 0."""
    for flag, value in (("--sequences", args.sequences), ("--micro-batch", args.micro_batch)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1.")
    if args.text is not None and args.split is not None:
        raise ConfigError(f"--split {args.split} has no effect with --text, which is read whole; leave one of them out.")
    import torch

    from moe_train.data.tokenizer import load_tokenizer
    from moe_train.train.evaluate import evaluate
    from moe_train.train.restore import load_model_for_inference

    model, config, tokenizer_path = load_model_for_inference(args.path)
    if args.text is not None:
        batch_of, rows, bytes_per_token, what = text_rows(Path(args.text), load_tokenizer(tokenizer_path), config.data.seq_len)
    else:
        batch_of, rows, bytes_per_token, what = split_rows(config, args.split or "valid", args.data, tokenizer_path)
    rows = min(rows, args.sequences or rows)
    result = evaluate(model, batch_of, rows, args.micro_batch, bytes_per_token, torch.device("cpu"))
    assert result is not None
    numbers = {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        "sequences": rows,
        "data": what,
    }
    if args.json:
        print(json.dumps(numbers))
    else:
        print(f"{what}: {rows:,} sequences of {config.data.seq_len}, {result.tokens:,} tokens")
        print(f"loss {result.loss:.4f} nats a token · perplexity {result.perplexity:.2f} · {result.bits_per_byte:.4f} bits per byte")
    return 0


def split_rows(config: Config, split: str, prefix: str | None, tokenizer: Path) -> Rows:
    """The run's own data, or a prepared pair cut by the run's data.split."""
    from moe_train.data import build_data

    if prefix is not None:
        config.data.kind, config.data.paths, config.data.weights, config.data.tokenizer = "indexed", [prefix], None, str(tokenizer)
        config.data.max_bytes = None
    stream = build_data(config, split)
    return stream.batch, stream.num_sequences, stream.bytes_per_token, f"{split} split of {prefix or config.data.kind}"


def text_rows(path: Path, tokenizer: Tokenizer, seq_len: int) -> Rows:
    """One document as rows of seq_len tokens; the last row is padded, and each token but the first is predicted once."""
    import torch

    from moe_train.model.batch import IGNORE, PADDING, Batch

    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read --text {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is not UTF-8 text (byte {error.start}).") from None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < 2:
        raise ConfigError(f"--text {path} has {len(ids)} tokens; at least 2 are needed to predict one.")
    rows = -(-(len(ids) - 1) // seq_len)
    missing = rows * seq_len - (len(ids) - 1)
    inputs = torch.tensor(ids[:-1] + [0] * missing).view(rows, seq_len)
    labels = torch.tensor(ids[1:] + [IGNORE] * missing).view(rows, seq_len)
    documents = torch.where(labels == IGNORE, PADDING, 0)

    def batch_of(start: int, count: int) -> Batch:
        return Batch(inputs[start : start + count], labels[start : start + count], documents[start : start + count])

    return batch_of, rows, len(text.encode("utf-8")) / len(ids), str(path)
