"""A verb that takes a composed config: Hydra's own command line (--help, --cfg, --info, --multirun, launchers, completion) around it.

Hydra keeps out of the run: it never changes the working directory and writes no outputs/, .hydra/ or log file (conf/config.yaml). A sweep
gives each job its own folder below run.dir, named by the overrides that differ, and reports the worst exit code.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moe_train.config import Config, ConfigError, RunError
from moe_train.config.compose import CONFIG_NAME, config_dir, explained, register_schema, typed
from moe_train.config.validate import layout_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

PROGRAM = "moe-train"


def run_hydra_verb(verb: str, arguments: list[str]) -> int:
    """Compose, validate and run. Hydra's flags keep their meaning."""
    codes: list[int] = []
    refused: list[Exception] = []
    owner = os.getpid()

    def job(composed: DictConfig) -> None:
        in_sweep = _own_folder(composed, arguments)
        try:
            config = typed(composed)
            one_process(config)
            codes.append(importlib.import_module(f"moe_train.recipes.{verb}").run(config) or 0)
        except (ConfigError, RunError) as error:
            if os.getpid() != owner:  # a launcher plugin's worker: only an exception reaches the sweep
                raise
            if not in_sweep:
                refused.append(error)
                return
            # The other jobs of the sweep go on; the exit code tells in the end.
            codes.append(2 if isinstance(error, ConfigError) else 1)
            print(f"{PROGRAM}: error: {composed.run.dir}: {error}", file=sys.stderr)

    code = call_hydra(f"{PROGRAM} {verb}", arguments, job)
    if refused:
        raise refused[0]
    return max(codes, default=code)


def one_process(config: Config) -> None:
    """Refuse layouts of several processes: first what could never work, then what this version does not do."""
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"the environment says WORLD_SIZE={given!r}, which is no number of processes; unset it or start by torchrun.")
    world = int(given)
    layout = layout_of(config, None if world == 1 else world)
    if layout.world_size > 1 or world > 1:
        raise ConfigError(
            f"training runs in one process in this version, but WORLD_SIZE={world} and the degrees of parallel.* ask for "
            f"{layout.world_size} processes; start one process and leave every degree at 1."
        )


def call_hydra(program: str, arguments: list[str], job: Callable[[DictConfig], None]) -> int:
    """hydra.main around `job`, with errors as exceptions and exit codes as numbers."""
    import hydra
    from hydra.errors import HydraException

    register_schema()
    started: list[bool] = []

    def task(composed: DictConfig) -> None:
        started.append(True)
        job(composed)

    with _arguments(program, arguments), explained():
        try:
            hydra.main(config_path=config_dir(), config_name=CONFIG_NAME, version_base="1.3")(task)()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except (ValueError, OSError) as error:
            # Hydra's own: flags that exclude each other, a sweep's folder that cannot be made. What a job raises stays as it is.
            if started or isinstance(error, (ConfigError, HydraException)):
                raise
            if isinstance(error, OSError) and error.filename is not None:
                raise ConfigError(
                    f"a sweep cannot make its folder {error.filename}: {error.strerror}. Set run.dir to a folder you may write to."
                ) from None
            raise ConfigError(str(error)) from None
    return 0


@contextmanager
def _arguments(program: str, arguments: list[str]) -> Iterator[None]:
    """What Hydra reads from the process: its arguments, and that errors are raised instead of printed."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [program, *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _own_folder(composed: DictConfig, arguments: list[str]) -> bool:
    """In a sweep: give the job its own run.dir, named by the overrides that differ between jobs. Returns whether this is a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        return False
    varying = [override for override in hydra_config.overrides.task if override not in arguments]
    if not any(override.lstrip("+").startswith(("run.dir=", "run.name=")) for override in varying):
        name = ",".join(varying).replace("/", "_") or str(hydra_config.job.num)
        composed.run.dir = f"{composed.run.dir}/{name}"
    print(f"job {hydra_config.job.num}: {composed.run.dir}", file=sys.stderr)
    return True


def complete_shell(arguments: list[str], verbs: list[str], config_verbs: tuple[str, ...]) -> int:
    """`moe-train -sc install=bash` prints the script for the shell; `-sc query=bash` answers it: verbs, then overrides."""
    if any(argument.startswith("query=") for argument in arguments):
        line = os.environ.get("COMP_LINE", "")
        words = line.split()
        if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
            start = words[1] if len(words) == 2 else ""
            print(" ".join(verb for verb in verbs if verb.startswith(start)))
            return 0
        if words[1] not in config_verbs:
            return 0
        os.environ["COMP_LINE"] = f"app {line.split(words[1], 1)[1].lstrip()}"
    return call_hydra(PROGRAM, ["-sc", *arguments], lambda composed: None)
