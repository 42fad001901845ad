"""`moe-train generate`: continue a text with a checkpoint, streaming to stdout."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moe_train.config import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = "\N{REPLACEMENT CHARACTER}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("path", metavar="RUN_OR_CHECKPOINT", help="a run folder (its newest checkpoint), or one checkpoint folder")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    text.add_argument("--prompt-file", metavar="FILE", help="read the text from a file; - for standard input")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="most tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token each time (default: 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling (default: 0.95; 1 switches it off)")
    parser.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same text (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    check(args)
    prompt = read_prompt(args)
    from moe_train.data.tokenizer import end_of_text, load_tokenizer
    from moe_train.model.sampling import Sampling, generate
    from moe_train.train.restore import load_model_for_inference

    model, config, tokenizer_path = load_model_for_inference(args.path)
    tokenizer = load_tokenizer(tokenizer_path)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    room = config.model.max_seq_len - len(ids)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens and the model's limit is model.max_seq_len={config.model.max_seq_len}; "
            f"use a prompt of at most {config.model.max_seq_len - 1} tokens."
        )
    if args.max_tokens > room:
        print(f"the model's limit of {config.model.max_seq_len} tokens leaves room for {room} of {args.max_tokens}.", file=sys.stderr)
    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.seed)
    tokens = generate(model, ids, min(args.max_tokens, room), sampling, end_of_text(tokenizer))
    sys.stdout.write(prompt)
    for piece in stream_text(tokenizer, tokens):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def check(args: argparse.Namespace) -> None:
    """ConfigError for a number out of range, before anything is loaded."""
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {args.max_tokens} must be at least 1.")
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise ConfigError(f"--temperature {args.temperature} must be 0 (greedy) or above.")
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p {args.top_p} must be above 0 and at most 1.")
    if args.top_k is not None and args.top_k < 1:
        raise ConfigError(f"--top-k {args.top_k} must be at least 1.")


def read_prompt(args: argparse.Namespace) -> str:
    """The text of --prompt or --prompt-file."""
    if args.prompt is not None:
        prompt = args.prompt
    else:
        try:
            raw = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
            prompt = raw.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read --prompt-file {args.prompt_file}: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompt-file {args.prompt_file} is not UTF-8 text (byte {error.start}).") from None
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character.")
    return prompt


def stream_text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text pieces as soon as they are whole: a character of several bytes may span tokens, so a piece that ends in
    one waits for the next."""
    ids: list[int] = []
    shown = 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith(PIECE):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids, skip_special_tokens=True)[shown:]
