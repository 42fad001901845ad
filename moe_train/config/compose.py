"""From Hydra groups and overrides to one typed, validated Config. Imports hydra only when called, so that `--help` stays instant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_train.config.errors import ConfigError, nearest
from moe_train.config.run import Config
from moe_train.config.scale import scaled
from moe_train.config.validate import validate

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_NAME = "config"


def config_dir() -> str:
    """Folder of the Hydra groups: the sibling of this package in a checkout and in an installed wheel. Not `import conf`: that would find
    the folder `conf` of whatever project the user stands in."""
    return str(Path(__file__).resolve().parents[2] / "conf")


def register_schema() -> None:
    """Make the dataclasses known to Hydra as the first entry of the defaults list: every key is typed, no other key exists."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: list[str]) -> Config:
    """The validated config of `conf/config.yaml` with these overrides, as the command line understands them."""
    return typed(compose_untyped(overrides))


def compose_untyped(overrides: list[str]) -> DictConfig:
    """As `--cfg job` shows it: interpolations unresolved, nothing scaled or validated."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_schema()
    GlobalHydra.instance().clear()
    with explained(), initialize_config_dir(config_dir(), version_base="1.3"):
        try:
            return hydra_compose(CONFIG_NAME, overrides=overrides)
        except ValueError as error:  # such as train=3: a number where a group's choice belongs
            if type(error) is not ValueError:
                raise
            raise ConfigError(f"{error} (overrides: {' '.join(overrides)})") from None


def typed(composed: DictConfig) -> Config:
    """Dataclasses with every interpolation resolved, the dial of the model applied, checked as a whole."""
    from omegaconf import OmegaConf

    with explained():
        _refuse_unknown(composed)
        config = OmegaConf.to_object(composed)
    if not isinstance(config, Config):
        raise ConfigError("the composed config lost its schema; keep `- schema` first in the defaults list of conf/config.yaml.")
    if config.model.scale != 1:
        config.model = scaled(config.model)
    validate(config)
    return config


def _refuse_unknown(composed: DictConfig) -> None:
    """Hydra lets `+key=value` add a key to a typed config; nothing would read it."""
    from omegaconf import OmegaConf

    def walk(node: Any, schema: Any, prefix: str) -> None:
        known = {field.name: getattr(schema, field.name) for field in fields(schema)}
        for key, value in node.items():
            if key not in known:
                full = f"{prefix}{key}"
                while isinstance(value, dict) and len(value) == 1:
                    [(inner, value)] = value.items()
                    full = f"{full}.{inner}"
                hint = nearest(full, [*known_keys(), *groups()])
                raise ConfigError(f"{full} is no key and no group of the config.{hint}")
            if is_dataclass(known[key]) and isinstance(value, dict):
                walk(value, known[key], f"{prefix}{key}.")

    walk(OmegaConf.to_container(composed, resolve=False), Config(), "")


@contextmanager
def explained() -> Iterator[None]:
    """Turn what Hydra and OmegaConf say about the user's overrides into one ConfigError with the nearest name."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from None


def explain(error: Exception) -> str:
    """One message out of Hydra's, for an unknown key, an unknown choice of a group, or a wrong value."""
    override = getattr(error, "override", None)
    if override:
        reason = str(error).splitlines()[0].removeprefix(f"Error parsing override '{override}'")
        return f"{override!r} is no override{': ' if reason else ''}{reason}. Write key=value, group=choice or +experiment=NAME."
    texts = [str(error)] + ([str(error.__cause__)] if error.__cause__ is not None else [])
    text = "\n".join(texts)
    if (found := re.search(r"Could not override '(\w+)'", text)) and found[1] in groups():
        return f"{found[1]} has no default; add it with a plus sign: +{found[1]}=NAME, NAME one of {', '.join(group_options(found[1]))}."
    if found := re.search(r"Could not (?:override|append to config|delete from config)\.? ?'?([\w./@]+)'?", text):
        key = found[1].rstrip(".")
        if "not in struct" in text or "not in '" in text or "No match" in text:
            return f"{key} is no key of the config.{nearest(key, [*known_keys(), *groups()])}"
    if found := re.search(r"Key '([\w.]+)' (?:is )?not in", text):
        key = _full_key(text) or found[1]
        return f"{key} is no key of the config.{nearest(key, known_keys())}"
    if found := re.search(r"Could not find '([\w./-]+)'", text):
        group, _, name = found[1].rpartition("/")
        options = group_options(group)
        if options:
            return f"{group}={name} is not known; choose one of {', '.join(options)}.{nearest(name, options)}"
        return f"there is no config group or file '{found[1]}'.{nearest(found[1], groups())}"
    if found := re.search(r"Could not override '([\w./@]+)'\.\s*No match in the defaults list", text):
        return f"{found[1]} is neither a key nor a group of the config.{nearest(found[1], [*known_keys(), *groups()])}"
    key = _full_key(text)
    message = " ".join((texts[1] if len(texts) > 1 and key else texts[0]).split("full_key:")[0].split())
    return f"{key}: {message}" if key and not message.startswith(key) else message


def _full_key(text: str) -> str | None:
    found = re.search(r"full_key: ([\w.\[\]]+)", text)
    return found[1] if found else None


def known_keys() -> list[str]:
    """Every key of the config, inner nodes too: `model`, `model.moe`, `model.moe.top_k` …"""

    def walk(node: Any, prefix: str) -> list[str]:
        keys = []
        for field in fields(node):
            value = getattr(node, field.name)
            keys.append(prefix + field.name)
            keys += walk(value, f"{prefix}{field.name}.") if is_dataclass(value) else []
        return keys

    return walk(Config(), "")


def groups() -> list[str]:
    """Folders of conf/ that hold choices."""
    return sorted(p.name for p in Path(config_dir()).iterdir() if p.is_dir() and p.name != "composed" and list(p.glob("*.yaml")))


def group_options(group: str) -> list[str]:
    """Choices of one group, [] where there is no such group."""
    return sorted(path.stem for path in (Path(config_dir()) / group).glob("*.yaml")) if group in groups() else []
