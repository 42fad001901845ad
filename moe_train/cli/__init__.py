"""The command line: `moe-train VERB …`. Nothing heavy is imported before the verb is known, so that `--help` is instant."""

from moe_train.cli.main import main

__all__ = ["main"]
