"""Checkpoint folders. Law: a checkpoint exists only when it is whole.

    run.dir/checkpoints/step_00000100/   model.safetensors  optimizer.safetensors  state.json  config.yaml  tokenizer.json  manifest.json
    run.dir/checkpoints/latest           the name of the newest one, moved last

A save writes `.tmp-step_…`, fsyncs each file, reads each back and compares its hash, writes manifest.json (size and SHA-256 of every
file) last, renames the folder, fsyncs the parent and then moves the pointer. Whatever instant the process dies at, the older checkpoint
is whole and found. Loading reads JSON, YAML and safetensors only: no file of a checkpoint can run code.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_train.config import ConfigError, RunError
from moe_train.train.tensors import FileSum, file_sum, sync_folder, write_bytes, write_tensors

MANIFEST, POINTER, HALF = "manifest.json", "latest", ".tmp-"
VERSION = 1
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".distcp")


@dataclass
class Snapshot:
    """What one checkpoint holds. tensors: file stem -> name -> tensor (live, or copies for an asynchronous write); texts: file name ->
    bytes."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: dict[str, Any]
    texts: dict[str, bytes]

    def copy_tensors(self) -> None:
        """Replace live tensors by CPU copies, so that training may go on."""
        self.tensors = {
            stem: {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()} for stem, tensors in self.tensors.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for tensors in self.tensors.values() for t in tensors.values())


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def save(root: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write one checkpoint below `root`, then remove older ones beyond `keep`. OSError when the disk does not take it; nothing older is
    lost."""
    root.mkdir(parents=True, exist_ok=True)
    target, half = root / folder_name(snapshot.step), root / (HALF + folder_name(snapshot.step))
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir()
        _write(half, snapshot)
        _replace(half, target)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    point_to(target)
    retain(root, keep)
    return target


def _write(folder: Path, snapshot: Snapshot) -> None:
    sums = {f"{stem}.safetensors": write_tensors(folder / f"{stem}.safetensors", tensors) for stem, tensors in snapshot.tensors.items()}
    texts = {"state.json": _json(snapshot.state), **snapshot.texts}
    sums |= {name: write_bytes(folder / name, data) for name, data in texts.items()}
    for name, wanted in sums.items():
        if file_sum(folder / name) != wanted:
            raise RunError(f"{folder / name} does not read back as it was written; the disk is failing. Older checkpoints are untouched.")
    files = {name: asdict(wanted) for name, wanted in sums.items()}
    write_bytes(folder / MANIFEST, _json({"version": VERSION, "step": snapshot.step, "files": files}))
    sync_folder(folder)


def _replace(half: Path, target: Path) -> None:
    """Rename, putting an older folder of the same step (of a run that was rolled back) out of the way first."""
    old = target.with_name(f"{HALF}old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    half.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def point_to(target: Path) -> None:
    """Move the pointer atomically."""
    half = target.with_name(HALF + POINTER)
    half.unlink(missing_ok=True)
    write_bytes(half, f"{target.name}\n".encode())
    half.replace(target.with_name(POINTER))
    sync_folder(target.parent)


def retain(root: Path, keep: int) -> None:
    """Remove all but the `keep` last written whole checkpoints (at least one). Folders that are not whole are left for the user to look
    at."""
    whole = [folder for folder in _folders(root) if not problems(folder, hashes=False)]
    whole.sort(key=lambda folder: (folder.name == pointed(root), (folder / MANIFEST).stat().st_mtime_ns), reverse=True)
    for folder in whole[max(1, keep) :]:
        # Out of sight first: a removal cut short must not leave a folder that looks like a checkpoint.
        doomed = folder.with_name(f"{HALF}old-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_halves(root: Path) -> None:
    """Remove what a killed process left behind. Only for the one process that owns the run folder."""
    for half in root.glob(f"{HALF}*"):
        if half.is_dir():
            shutil.rmtree(half, ignore_errors=True)
        else:
            half.unlink(missing_ok=True)


def problems(folder: Path, hashes: bool = True) -> str:
    """Why `folder` is not a whole checkpoint, or '' when it is. Without `hashes` only names and sizes are compared."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, files = manifest["version"], {str(name): FileSum(**entry) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        found = [path.name for path in folder.iterdir() if path.suffix in PICKLES] if folder.is_dir() else []
        return f"it has no {MANIFEST}" + (f" ({', '.join(found[:3])} can hold a pickle and is never loaded)" if found else "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    if version != VERSION:
        return f"its format is version {version}, and this program reads version {VERSION}"
    for name, wanted in files.items():
        try:
            why = _differs(folder, name, wanted, hashes)
        except OSError as error:
            why = f"{name} cannot be read ({error.strerror})"
        if why:
            return why
    return ""


def _differs(folder: Path, name: str, wanted: FileSum, hashes: bool) -> str:
    path = folder / name
    if Path(name).name != name or not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != wanted.size:
        return f"{name} has {path.stat().st_size} bytes instead of {wanted.size}"
    if hashes and file_sum(path) != wanted:
        return f"{name} does not have the SHA-256 of {MANIFEST}"
    return ""


def newest_whole(root: Path) -> Path | None:
    """The checkpoint the pointer names; when it is missing or damaged, the newest other one that is whole, with a word on stderr."""
    folders = _folders(root)
    first = root / pointed(root)
    candidates = [folder for folder in folders if folder == first] + [folder for folder in reversed(folders) if folder != first]
    for folder in candidates:
        why = problems(folder)
        if not why:
            if folder != candidates[0]:
                print(f"falling back to {folder}, the newest checkpoint that is whole.", file=sys.stderr)
            return folder
        print(f"checkpoint {folder} is not whole: {why}.", file=sys.stderr)
    if candidates:
        raise ConfigError(
            f"none of the {len(candidates)} checkpoints in {root} is whole (see above). "
            "Restore one from a backup, or start anew with another run.dir."
        )
    return None


def require_whole(folder: Path) -> Path:
    """`folder` if it is a whole checkpoint; ConfigError otherwise."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a checkpoint folder (…/checkpoints/step_00000100).")
    why = problems(folder)
    if why:
        raise ConfigError(f"{folder} is not a whole checkpoint: {why}.")
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_bytes())


def pointed(root: Path) -> str:
    """The folder name in the pointer file ('' without one)."""
    try:
        name = (root / POINTER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if name.startswith("step_") and os.sep not in name else ""


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, oldest step first."""
    return sorted((path for path in root.glob("step_*") if path.is_dir()), key=lambda path: (len(path.name), path.name))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
