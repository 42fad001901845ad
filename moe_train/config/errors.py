"""The errors a user can cause, and the exit code each leads to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """The user's mistake: the command line prints the message alone (no traceback) and exits with code 2.

    A message names the numbers that do not fit and the way out, in one or two sentences.
    """


class RunError(RuntimeError):
    """A run that failed through no fault of its config (a full disk, too many non-finite steps): exit code 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean `x`?' for the known name closest to `name`, or an empty string when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean `{matches[0]}`?" if matches else ""


def require_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    known = list(choices)
    if value not in known:
        raise ConfigError(f"{key}={value} is not known; choose one of {', '.join(known)}.{nearest(value, known)}")
