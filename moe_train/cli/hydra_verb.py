"""A verb that takes a composed config: Hydra's own command line (--help, --cfg, --multirun, --info, tab completion) around a recipe."""

from __future__ import annotations

import importlib
import sys

from moe_train.config.compose import CONFIG_NAME, compose, config_dir, register_schema, typed
from moe_train.config.errors import ConfigError, nearest


def run_hydra_verb(verb: str, arguments: list[str]) -> int:
    """Compose, validate and run; Hydra's flags keep their meaning."""
    if any(argument.startswith("-") for argument in arguments):
        return _hydra_main(verb, arguments)
    try:
        config = compose(arguments)
    except ConfigError:
        raise
    except _hydra_errors() as error:
        raise ConfigError(explain(error, arguments)) from None
    return importlib.import_module(f"moe_train.recipes.{verb}").run(config) or 0


def _hydra_errors() -> tuple[type[Exception], ...]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException


def explain(error: Exception, arguments: list[str]) -> str:
    """One message out of Hydra's: the innermost cause, and the nearest existing name."""
    text = str(error).split("\nConfig search path")[0].strip()
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text = f"{text}: {str(error.__cause__).splitlines()[0]}"
    wrong = next((a.split("=")[0].lstrip("+~") for a in arguments if a.split("=")[0].lstrip("+~") in text), "")
    return " ".join(text.split()) + nearest(wrong, known_keys())


def known_keys() -> list[str]:
    from omegaconf import OmegaConf

    from moe_train.config import Config

    def walk(node: dict, prefix: str) -> list[str]:
        keys = []
        for key, value in node.items():
            keys.append(prefix + str(key))
            if isinstance(value, dict):
                keys += walk(value, f"{prefix}{key}.")
        return keys

    tree = OmegaConf.to_container(OmegaConf.structured(Config))
    return walk(tree, "") if isinstance(tree, dict) else []


def _hydra_main(verb: str, arguments: list[str]) -> int:
    import hydra
    from omegaconf import DictConfig

    register_schema()
    codes: list[int] = []

    @hydra.main(config_path=config_dir(), config_name=CONFIG_NAME, version_base="1.3")
    def job(composed: DictConfig) -> None:
        codes.append(importlib.import_module(f"moe_train.recipes.{verb}").run(typed(composed)) or 0)

    before = sys.argv
    sys.argv = [f"moe-train {verb}", *arguments]
    try:
        job()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before
    return max(codes, default=0)
