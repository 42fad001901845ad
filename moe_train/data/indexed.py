"""A `.bin/.idx` pair of megatron-core as documents: checked before use, then memory-mapped by megatron's IndexedDataset."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_train.config import ConfigError
from moe_train.data import megatron
from moe_train.data.writer import part

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token type, number of sequences, number of document boundaries."""
INTEGER_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK_BYTES = 4096
BLOCK = 1 << 20
WAY_OUT = "Make it again with `moe-train prepare-data --force`."


class TokenFile:
    """The documents of one pair. `read(document, start, length)` is a view into the memory map.

    document_sizes int32 or int64 [documents]: tokens of each document, its end-of-document token included.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        check_pair(prefix)
        self._data = megatron.indexed_dataset().IndexedDataset(prefix, mmap=True)
        self._dtype = self._data.index.dtype
        self._itemsize = np.dtype(self._dtype).itemsize
        index = self._data.index
        self.num_tokens = int(index.sequence_lengths.sum(dtype=np.int64))
        boundaries = index.document_indices
        if len(boundaries) == len(index) + 1 and (np.diff(boundaries) == 1).all():
            # One sequence a document, as `prepare-data` writes it: the tables of the file serve as they are, memory-mapped.
            self.document_sizes, self._start_bytes = index.sequence_lengths, index.sequence_pointers
        else:
            # Several sequences a document (sentences); they are contiguous, so a document is one span of tokens.
            ends = np.concatenate([[0], np.cumsum(index.sequence_lengths, dtype=np.int64)])
            self.document_sizes = np.diff(ends[boundaries])
            self._start_bytes = ends[boundaries[:-1]] * self._itemsize

    @property
    def num_documents(self) -> int:
        return len(self.document_sizes)

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        offset = int(self._start_bytes[document]) + start * self._itemsize
        return self._data.bin_reader.read(dtype=self._dtype, count=length, offset=offset)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What `prepare-data` noted; empty for a pair made by another program."""
        path = part(self.prefix, ".meta.json")
        if not path.is_file():
            return {}
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not JSON ({error}). Remove it or {WAY_OUT[0].lower()}{WAY_OUT[1:]}") from None
        if meta.get("tokens") != self.num_tokens or meta.get("documents") != self.num_documents:
            raise ConfigError(
                f"{path} speaks of {meta.get('documents')} documents and {meta.get('tokens')} tokens, but the pair beside it holds "
                f"{self.num_documents} and {self.num_tokens}: they are not of one run. {WAY_OUT}"
            )
        return meta

    @cached_property
    def document_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of each document's text, int64 [documents]; None when unknown."""
        path = part(self.prefix, ".bytes.npy")
        if not path.is_file():
            return None
        try:
            sizes = np.load(path, allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ConfigError(f"{path} cannot be read ({error}). Remove it or make the data again.") from None
        if len(sizes) != self.num_documents:
            raise ConfigError(f"{path} has {len(sizes)} documents, the pair beside it {self.num_documents}. {WAY_OUT}")
        return sizes

    @cached_property
    def fingerprint(self) -> str:
        """Hash of both sizes and of evenly spread blocks of both files: by content, yet instant for terabytes."""
        digest = hashlib.sha256()
        for suffix in (".idx", ".bin"):
            path = part(self.prefix, suffix)
            size = path.stat().st_size
            digest.update(str(size).encode())
            with path.open("rb") as stream:
                for block in range(FINGERPRINT_BLOCKS):
                    stream.seek(max(0, size - FINGERPRINT_BLOCK_BYTES) * block // (FINGERPRINT_BLOCKS - 1))
                    digest.update(stream.read(FINGERPRINT_BLOCK_BYTES))
        return digest.hexdigest()


@dataclass
class _Header:
    item_bytes: int
    num_sequences: int
    num_boundaries: int

    @property
    def expected_bytes(self) -> int:
        return HEADER.size + 12 * self.num_sequences + 8 * self.num_boundaries


def check_pair(prefix: str) -> None:
    """Raise ConfigError unless PREFIX.idx and PREFIX.bin exist, are of the format and have exactly the sizes that the index announces."""
    idx, bin_ = part(prefix, ".idx"), part(prefix, ".bin")
    present = [path for path in (idx, bin_) if path.is_file()]
    if not present:
        hint = " Give the prefix without `.bin`." if prefix.endswith((".bin", ".idx")) else ""
        raise ConfigError(
            f"no data at {prefix}: neither {idx} nor {bin_} exists.{hint} Make them with `moe-train prepare-data … --output {prefix}`."
        )
    if len(present) == 1:
        raise ConfigError(f"{present[0]} exists but its other half {(bin_ if present[0] == idx else idx).name} is missing. {WAY_OUT}")
    try:
        header = _read_header(idx)
        lengths, pointers, boundaries = _read_tables(idx, header)
        size = bin_.stat().st_size
        with bin_.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or prefix}: {error.strerror}.") from None
    tokens = int(lengths.sum(dtype=np.int64))
    wanted = tokens * header.item_bytes
    if size != wanted:
        raise ConfigError(
            f"{bin_} is {'truncated' if size < wanted else 'longer than its index'}: it has {size} bytes, but its index announces {tokens} "
            f"tokens of {header.item_bytes} bytes = {wanted}. {WAY_OUT}"
        )
    if tokens == 0:
        raise ConfigError(f"{bin_} holds no tokens ({header.num_boundaries - 1} documents). Prepare files that hold text.")
    _check_tables(idx, header, lengths, pointers, boundaries)


def _check_tables(idx: Path, header: _Header, lengths: np.ndarray, pointers: np.ndarray, boundaries: np.ndarray) -> None:
    """Boundaries run upward from 0 to the number of sequences; sequences lie end to end. In blocks, to bound memory."""
    if boundaries[0] != 0 or boundaries[-1] != header.num_sequences or (np.diff(boundaries) < 0).any() or lengths.min() < 0:
        raise ConfigError(f"{idx} is corrupt: its document boundaries do not run from 0 to {header.num_sequences}. {WAY_OUT}")
    expected = 0
    for start in range(0, header.num_sequences, BLOCK):
        ends = expected + np.cumsum(lengths[start : start + BLOCK], dtype=np.int64) * header.item_bytes
        if (pointers[start : start + BLOCK] != np.concatenate([[expected], ends[:-1]])).any():
            raise ConfigError(f"{idx} is corrupt: its sequences do not lie end to end (near sequence {start}). {WAY_OUT}")
        expected = int(ends[-1])


def _read_header(idx: Path) -> _Header:
    with idx.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if not raw.startswith(MAGIC):
        raise ConfigError(f"{idx} is not an index of megatron-core (it begins with {raw[:9]!r}, not {MAGIC!r}). {WAY_OUT}")
    if len(raw) < HEADER.size:
        raise ConfigError(f"{idx} is truncated: {len(raw)} bytes, its header alone has {HEADER.size}. {WAY_OUT}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(raw)
    if version != 1:
        raise ConfigError(f"{idx} has version {version}; version 1 is supported. {WAY_OUT}")
    if code not in INTEGER_CODES:
        raise ConfigError(f"{idx} has token type {code}, which is no integer type ({sorted(INTEGER_CODES)}). {WAY_OUT}")
    return _Header(np.dtype(INTEGER_CODES[code]).itemsize, num_sequences, num_boundaries)


def _read_tables(idx: Path, header: _Header) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequence lengths int32, byte offsets int64 and document boundaries int64, memory-mapped; the file's size fits the header."""
    size = idx.stat().st_size
    if size == header.expected_bytes + header.num_sequences and header.num_sequences > 0:
        raise ConfigError(f"{idx} is a multimodal index (it carries a mode for each sequence); only text is supported.")
    if size != header.expected_bytes or header.num_boundaries < 1:
        problem = "truncated" if size < header.expected_bytes else "damaged"
        raise ConfigError(
            f"{idx} is {problem}: {size} bytes, but {header.num_sequences} sequences and {header.num_boundaries} document boundaries "
            f"need {header.expected_bytes}. {WAY_OUT}"
        )
    count = header.num_sequences
    table = np.memmap(idx, dtype=np.uint8, mode="r", offset=HEADER.size)
    lengths, pointers, boundaries = table[: 4 * count], table[4 * count : 12 * count], table[12 * count :]
    return lengths.view(np.int32), pointers.view(np.int64), boundaries.view(np.int64)
