"""Dispatch of a verb, and what becomes of its errors: 2 for the user's mistake, 1 for a failure of the run, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from moe_train import __version__
from moe_train.cli.openmp import wait_briefly
from moe_train.config.errors import ConfigError, RunError, nearest

VERBS = {
    "pretrain": "train a model: Hydra overrides, for example +experiment=demo train.steps=50",
    "evaluate": "loss, perplexity and bits per byte of a checkpoint",
    "generate": "continue a text with a checkpoint",
    "prepare-data": "turn text, JSON lines, Parquet or a Hugging Face data set into tokens",
    "inspect": "parameters, bytes, FLOPs and cache of a model, without building it",
    "layout": "which rank holds what, for a number of processes and degrees of parallelism",
}
HYDRA_VERBS = ("pretrain",)
CONFIG_VERBS = ("pretrain", "inspect")
"""Verbs whose arguments tab completion takes from the config."""
COMPLETION_FLAGS = ("-sc", "--shell-completion")
USAGE = "usage: moe-train VERB [arguments]\n       moe-train VERB --help"


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    wait_briefly(os.environ)  # before torch is imported
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        print(f"moe-train: error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"moe-train: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has gone: nothing more to say. Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"moe-train {__version__}")
        return 0
    flag = next((i for i, argument in enumerate(arguments[:2]) if argument in COMPLETION_FLAGS), None)
    if flag is not None:
        from moe_train.cli.hydra_verb import complete_shell

        return complete_shell(arguments[flag + 1 :], list(VERBS), CONFIG_VERBS)
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        raise ConfigError(f"there is no verb `{verb}`; choose one of {', '.join(VERBS)}.{nearest(verb, VERBS)}")
    if verb in HYDRA_VERBS:
        from moe_train.cli.hydra_verb import run_hydra_verb

        return run_hydra_verb(verb, rest)
    recipe = importlib.import_module(f"moe_train.recipes.{verb.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"moe-train {verb}", description=VERBS[verb])
    recipe.add_arguments(parser)
    try:
        return recipe.run(parser.parse_args(rest)) or 0
    except SystemExit as stop:
        return int(stop.code or 0)


def overview() -> str:
    width = max(map(len, VERBS))
    lines = [USAGE, "", "verbs:"] + [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    return "\n".join([*lines, "", "Exit codes: 0 done, 1 the run failed, 2 something you asked for cannot be done, 130 interrupted."])
