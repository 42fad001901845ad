"""Tokens into a `.bin/.idx` pair of megatron-core, with what belongs beside it. All parts appear by rename, the `.idx` last.

PREFIX.bin, PREFIX.idx          megatron.core.datasets.indexed_dataset
PREFIX.tokenizer.json           the tokenizer
PREFIX.bytes.npy                int64 [documents], UTF-8 bytes of the text of each document
PREFIX.meta.json                documents, tokens, bytes, source, hashes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from moe_train.data import megatron
from moe_train.data.store import sync
from moe_train.data.tokenizer import tokenizer_hash, vocab_size

FORMAT = 1
SUFFIXES = (".bin", ".tokenizer.json", ".bytes.npy", ".meta.json", ".idx")
"""In the order in which they appear."""


def part(prefix: str | Path, suffix: str) -> Path:
    """PREFIX + suffix (a prefix may hold dots, so this is no with_suffix)."""
    return Path(f"{prefix}{suffix}")


class TokenWriter:
    """`with TokenWriter(…) as writer: writer.add(ids, num_bytes)`; nothing appears at `prefix` unless the block ends well.

    eod: the end-of-document token appended to each document, or None.
    """

    def __init__(self, prefix: str | Path, tokenizer: Tokenizer, eod: str | None, source: dict[str, Any]):
        self.prefix = Path(prefix)
        self.tokenizer, self.eod, self.source = tokenizer, eod, source
        self.eod_id = None if eod is None else tokenizer.token_to_id(eod)
        self.num_bytes: list[int] = []
        self.num_tokens = 0
        # Hidden and without a suffix anybody opens: a killed run leaves no pair.
        self._half = self.prefix.parent / f".{self.prefix.name}.half"
        self._builder: Any = None

    def __enter__(self) -> TokenWriter:
        module = megatron.indexed_dataset()
        dtype = module.DType.optimal_dtype(vocab_size(self.tokenizer))
        self._builder = module.IndexedDatasetBuilder(str(part(self._half, ".bin")), dtype=dtype)
        return self

    def add(self, ids: Sequence[int] | np.ndarray, num_bytes: int) -> None:
        """One document: its token ids without the end-of-document token, and the UTF-8 bytes of its text."""
        tokens = np.empty(len(ids) + (self.eod_id is not None), dtype=self._builder.dtype)
        tokens[: len(ids)] = ids
        if self.eod_id is not None:
            tokens[-1] = self.eod_id
        if len(tokens) == 0:
            return
        self._builder.add_document(tokens, [len(tokens)])
        self.num_bytes.append(num_bytes)
        self.num_tokens += len(tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._builder.data_file.close()
            self._remove_half()
            return
        self._builder.finalize(str(part(self._half, ".idx")))
        self.tokenizer.save(str(part(self._half, ".tokenizer.json")))
        np.save(part(self._half, ".bytes.npy"), np.array(self.num_bytes, dtype=np.int64))
        part(self._half, ".meta.json").write_text(json.dumps(self._meta(), indent=2) + "\n", encoding="utf-8")
        self._publish()

    def _meta(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "documents": len(self.num_bytes),
            "tokens": self.num_tokens,
            "bytes": sum(self.num_bytes),
            "dtype": np.dtype(self._builder.dtype).name,
            "vocab_size": vocab_size(self.tokenizer),
            "eod_token": self.eod,
            "eod_id": self.eod_id,
            "tokenizer_sha256": tokenizer_hash(self.tokenizer),
            "bin_sha256": file_sha256(part(self._half, ".bin")),
            "source": self.source,
        }

    def _publish(self) -> None:
        # An older pair of this name disappears first: its .idx must never stand beside the new .bin.
        part(self.prefix, ".idx").unlink(missing_ok=True)
        for suffix in SUFFIXES:
            sync(part(self._half, suffix))
            part(self._half, suffix).rename(part(self.prefix, suffix))
        sync(self.prefix.parent)

    def _remove_half(self) -> None:
        for suffix in SUFFIXES:
            part(self._half, suffix).unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
