"""From Hydra groups and overrides to one typed, validated Config. Imports hydra only when called, so that `--help` stays instant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moe_train.config.errors import ConfigError
from moe_train.config.run import Config

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_NAME = "config"


def config_dir() -> str:
    """Folder of the Hydra groups, in a checkout and in an installed wheel."""
    import conf

    return str(Path(next(iter(conf.__path__))).resolve())


def register_schema() -> None:
    """Make the dataclasses known to Hydra as the first entry of the defaults list: every key is typed, no other key exists."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: list[str]) -> Config:
    """The validated config of `conf/config.yaml` with these overrides, as the command line understands them."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return typed(hydra_compose(CONFIG_NAME, overrides=overrides))


def typed(composed: DictConfig) -> Config:
    """Dataclasses with every interpolation resolved, checked as a whole."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(composed)
    if not isinstance(config, Config):
        raise ConfigError("the composed config lost its schema; keep `- schema` first in the defaults list of conf/config.yaml.")
    return config
