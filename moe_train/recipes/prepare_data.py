"""`moe-train prepare-data`: text to tokens, and the index of the epochs before a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moe_train.config import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DESCRIPTION = """Turn text, JSON lines (.jsonl, also .gz and .zst), Parquet or a Hugging Face data set on disk into tokens: PREFIX.bin and
PREFIX.idx of megatron-core, with PREFIX.tokenizer.json, PREFIX.bytes.npy and PREFIX.meta.json. Documents keep the order of the inputs, and
data.split cuts that order into contiguous ranges, so shuffle inputs that are sorted by topic. Special tokens written inside
a text are coded as plain text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "inputs", nargs="*", metavar="INPUT", help="files, folders (searched to the bottom), or folders written by Dataset.save_to_disk"
    )
    parser.add_argument("--output", metavar="PREFIX", help="where PREFIX.bin and PREFIX.idx go")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json or a folder with a tokenizer")
    choice.add_argument("--train-bpe", type=int, metavar="VOCAB", help="train a byte-level BPE of this many tokens on the inputs")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key or column that holds the text (default: text)")
    parser.add_argument(
        "--glob", metavar="PATTERN", help="which files of a folder to take, for example '*.txt' (default: the known suffixes)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each CPU core)")
    parser.add_argument("--append-eod", dest="eod", action="store_true", default=True, help="append an end-of-document token (default)")
    parser.add_argument("--no-eod", dest="eod", action="store_false", help="append nothing; documents stay walls all the same")
    parser.add_argument("--eod-token", metavar="TOKEN", help="the token to append (default: the tokenizer's own end of text)")
    parser.add_argument("--force", action="store_true", help="overwrite PREFIX")
    parser.add_argument(
        "--build-index", nargs="+", metavar="OVERRIDE", help="instead: build what `moe-train pretrain OVERRIDE …` caches, without a run"
    )
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="with --build-index: epochs of the training split (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or ConfigError/RunError."""
    if args.build_index:
        return _build_index(args)
    if not args.inputs:
        raise ConfigError("prepare-data needs at least one INPUT: a file, a folder, or a folder written by Dataset.save_to_disk.")
    if not args.output:
        raise ConfigError("prepare-data needs --output PREFIX, the path of the .bin/.idx pair without its suffix.")
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers {args.workers}: at least 1 process is needed.")
    from moe_train.data.prepare import prepare

    tokenizer, eod = _tokenizer(args)
    done = prepare(args.inputs, args.output, tokenizer, eod, args.text_key, args.glob, args.workers, args.force)
    per_token = done.bytes / max(1, done.tokens)
    left_out = f", {done.empty:,} empty ones left out" if done.empty else ""
    print(
        f"{done.prefix}: {done.documents:,} documents{left_out}, {done.tokens:,} tokens, {done.bytes:,} bytes "
        f"({per_token:.2f} bytes a token)"
    )
    return 0


def _tokenizer(args: argparse.Namespace) -> tuple[Tokenizer | int, str | None]:
    """(tokenizer or the size of one to train, end-of-document token or None)."""
    from moe_train.data.tokenizer import END_OF_TEXT, end_token, load_tokenizer

    if args.train_bpe is not None:
        if args.eod_token not in (None, END_OF_TEXT):
            raise ConfigError(
                f"--eod-token {args.eod_token}: a BPE trained here has the end-of-document token {END_OF_TEXT}; leave --eod-token out."
            )
        return args.train_bpe, END_OF_TEXT if args.eod else None
    if args.tokenizer is None:
        raise ConfigError("prepare-data needs --tokenizer PATH (a tokenizer.json or its folder) or --train-bpe VOCAB (for example 8192).")
    tokenizer = load_tokenizer(args.tokenizer)
    if not args.eod:
        return tokenizer, None
    if args.eod_token is not None:
        if tokenizer.token_to_id(args.eod_token) is None:
            raise ConfigError(f"--eod-token {args.eod_token} is no token of {args.tokenizer}.")
        return tokenizer, args.eod_token
    path = Path(args.tokenizer).expanduser()
    return tokenizer, end_token(tokenizer, path if path.is_dir() else path.parent)


def _build_index(args: argparse.Namespace) -> int:
    from moe_train.config.compose import compose
    from moe_train.data import build_data
    from moe_train.data.split import SPLITS, parse_split

    if args.epochs < 1:
        raise ConfigError(f"--epochs {args.epochs}: at least 1 epoch is needed.")
    config = compose(args.build_index)
    for split, share in zip(SPLITS, parse_split(config.data.split), strict=True):
        if share == 0:
            continue
        stream = build_data(config, split)
        epochs = args.epochs if split == "train" else 1
        for epoch in range(epochs):
            stream.prepare_epoch(epoch)
        rows = f"{stream.num_sequences:,} rows of {config.data.seq_len} tokens"
        print(f"{split}: {rows}, {epochs} epoch(s) ready, fingerprint {stream.fingerprint[:12]}")
    return 0
