"""A folder that is either whole or absent, and is built by one process of a machine while the others wait."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from moe_train.config import ConfigError

STALE_SECONDS = 24 * 3600
"""A half-built folder left by a killed process is removed by the next builder when it is older than this."""


def cache_root(cache_dir: str | None) -> Path:
    """The folder for prepared data: `cache_dir`, else $MOE_TRAIN_CACHE, else ~/.cache/moe_train. Made if missing."""
    root = Path(cache_dir or os.environ.get("MOE_TRAIN_CACHE") or Path.home() / ".cache" / "moe_train").expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the data cache {root}: {error.strerror}. Set data.cache_dir or MOE_TRAIN_CACHE to a writable folder."
        ) from None
    return root


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, built by `build(empty folder)` unless it exists.

    Processes of one machine are kept apart by a lock (one builder per node, so nodes without a shared disk each have their files); where
    locks do not work (some network file systems) two builders do the same work and the later one finds the folder of the first: the rename
    decides.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            if not target.is_dir():
                _remove_stale(target)
                _build_and_rename(target, build)
    except PermissionError as error:
        raise ConfigError(
            f"cannot write to the data cache {target.parent}: {error.strerror}. Set data.cache_dir to a writable folder."
        ) from None
    return target


def _build_and_rename(target: Path, build: Callable[[Path], None]) -> None:
    half = Path(tempfile.mkdtemp(prefix=f".{target.name}.half-", dir=target.parent))
    try:
        half.chmod(0o755)
        build(half)
        for path in half.iterdir():
            sync(path)
        try:
            half.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        sync(target.parent)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    for half in target.parent.glob(f".{target.name}.half-*"):
        if time.time() - half.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(half, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync of a file or folder, so that a rename after it never shows a file without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
