"""run.dir: everything a run writes. Opened, locked and checked against the config before any weight is made."""

from __future__ import annotations

import fcntl
import os
import sys
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from moe_train.config import Config, ConfigError
from moe_train.train.checkpoint import newest_whole, point_to, remove_halves, require_whole
from moe_train.train.schedule import decay_span

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TOKENIZER = "tokenizer.json"


class RunDir:
    """One process at a time owns the folder: the lock is released by the system whenever the process ends, `kill -9` included."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser()
        self.checkpoints = self.path / "checkpoints"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock: TextIO = open(self.path / ".lock", "a+")  # noqa: SIM115  held until the process ends
        except OSError as error:
            raise ConfigError(f"run.dir={self.path} is not writable: {error.strerror}. Set run.dir to a folder you may write to.") from None
        self._take_lock()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip()
            self._lock.close()
            raise ConfigError(f"run.dir={self.path} is in use by process {owner}; stop it first, or choose another run.dir.") from None
        except OSError:
            return  # a file system without locks
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    def close(self) -> None:
        self._lock.close()

    def find_checkpoint(self, resume: str) -> Path | None:
        """What run.resume asks for: None starts from the beginning."""
        if resume == "never":
            if (self.path / CONFIG).exists() or (self.path / METRICS).exists() or any(self.checkpoints.iterdir()):
                raise ConfigError(
                    f"run.resume=never, but run.dir={self.path} already holds a run. "
                    "Choose another run.dir, or run.resume=auto to continue it."
                )
            return None
        remove_halves(self.checkpoints)
        if resume == "auto":
            return newest_whole(self.checkpoints)
        folder = require_whole(Path(resume).expanduser())
        if folder.resolve().parent == self.checkpoints.resolve():
            point_to(self.checkpoints / folder.name)
            return folder
        own = newest_whole(self.checkpoints)
        if own is not None:
            print(f"run.dir already went on from run.resume={resume}: continuing from {own}.", file=sys.stderr)
        return own or folder

    def write_config(self, config: Config) -> None:
        (self.path / CONFIG).write_bytes(config_yaml(config))


def config_yaml(config: Config) -> bytes:
    """The fully resolved config."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True).encode()


def read_config(path: Path) -> Config:
    """The config a run was started with. Keys this program does not know are an error, keys it has since gained take their defaults."""
    try:
        value = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return _typed(Config, value, str(path))


def _typed(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a mapping.")
    default = kind()
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(value) - known)
    if unknown:
        raise ConfigError(f"{where} has keys this version does not know: {', '.join(unknown)}.")
    for name, item in value.items():
        current = getattr(default, name)
        setattr(default, name, _typed(type(current), item, f"{where}: {name}") if is_dataclass(current) else item)
    return default


FIXED = (
    "seed",
    *(f"data.{name}" for name in ("kind", "seq_len", "split", "weights", "vocab_size", "max_bytes")),
    *(f"train.{name}" for name in ("global_batch", "batch_ramp", "precision")),
    "optim.name",
)
"""What must not change when a run continues: the next batch, or the state in the checkpoint, depends on it."""
FREE = ("run.", "log.", "demo.", "train.", "parallel.", "data.")
"""What may change without a word (the data themselves are compared by the stream's fingerprint, the schedule by `decay_span`)."""


def check_resumable(old: Config, new: Config, folder: Path) -> None:
    """ConfigError when the checkpoint cannot be continued exactly with `new`; warnings on stderr for changes that alter training."""
    changes = [(key, a, b) for (key, a), (_, b) in zip(_flat(asdict(old)), _flat(asdict(new)), strict=True) if a != b]
    broken = [f"{key} was {a}, now {b}" for key, a, b in changes if any(key == f or key.startswith(f"{f}.") for f in FIXED)]
    if broken:
        raise ConfigError(
            f"{folder} cannot be continued exactly: {'; '.join(broken)}. Restore the old value, or start a new run with another run.dir."
        )
    for key, a, b in changes:
        if not key.startswith(FREE) or key == "train.grad_clip":
            print(f"warning: {key} was {a} in {folder} and is {b} from here on.", file=sys.stderr)
    spans = [decay_span(c.optim.schedule, c.train.steps) for c in (old, new)]
    if spans[0] != spans[1]:
        print(
            f"warning: the learning rate decays over steps {_span(spans[1])} from here on; the run so far followed {_span(spans[0])}.",
            file=sys.stderr,
        )


def _span(span: tuple[int, int] | None) -> str:
    return "no decay" if span is None else f"{span[0]} … {span[1]}"


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, item in value.items() for pair in _flat(item, f"{prefix}.{key}" if prefix else key)]
