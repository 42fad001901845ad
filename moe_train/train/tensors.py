"""Tensors to a safetensors file, hashed while they are written. Reading goes through the `safetensors` library; nothing is ever unpickled.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the raw bytes. Writing it here, tensor
by tensor, needs no second copy of the model in memory, gives a plain OSError on a full disk, and the hash costs no second pass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
PIECE = 1 << 24
"""Bytes written and hashed at once."""


@dataclass(frozen=True)
class FileSum:
    size: int
    sha256: str


class HashingFile:
    """A new file whose content is hashed on its way and is on the disk when the block ends (fsync)."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115  closed by __exit__
        self._hash, self._size = hashlib.sha256(), 0

    def __enter__(self) -> HashingFile:
        return self

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    @property
    def sum(self) -> FileSum:
        return FileSum(self._size, self._hash.hexdigest())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    """Write a new safetensors file. Tensors may live on any device; each passes through the CPU alone."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashingFile(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE):
                file.write(data[start : start + PIECE])
    return file.sum


def write_bytes(path: Path, data: bytes) -> FileSum:
    with HashingFile(path) as file:
        file.write(data)
    return file.sum


def file_sum(path: Path) -> FileSum:
    """Size and hash of what is on the disk now."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileSum(path.stat().st_size, digest)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. ValueError when it is not one."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def sync_folder(path: Path) -> None:
    """fsync of a folder: the names in it (after a rename) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
