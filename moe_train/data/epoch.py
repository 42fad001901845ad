"""The order of one epoch: documents shuffled and laid end to end, cut into rows of T tokens (+ 1 for the last label), rows shuffled.

The construction is that of megatron-core's GPTDataset for exactly one epoch (a test compares them), with a random seed derived from
(seed, split, epoch). GPTDataset itself shuffles differently for another number of samples, so the stream would depend on train.steps.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_train.config import ConfigError
from moe_train.data import megatron
from moe_train.data.store import build_once

CACHED_ABOVE = 1 << 20
"""An epoch with more documents or rows is kept on disk and memory-mapped; a smaller one is built in memory in about 0.1 s."""
ARRAYS = ("document_order", "row_starts", "row_order")


@dataclass
class Epoch:
    """document_order int32 [documents]: indices into the split; row_starts [rows + 1, 2]: (position in document_order, token offset);
    row_order [rows]: permutation of the rows."""

    document_order: np.ndarray
    row_starts: np.ndarray
    row_order: np.ndarray

    def spans(self, index: int) -> list[tuple[int, int, int | None]]:
        """The pieces that make up the T + 1 tokens of row `index`: (document of the split, first token, length or None for the rest)."""
        row = int(self.row_order[index])
        (first, start), (last, stop) = self.row_starts[row].tolist(), self.row_starts[row + 1].tolist()
        documents = self.document_order[first : last + 1].tolist()
        if first == last:
            return [(documents[0], start, stop - start + 1)]
        middle: list[tuple[int, int, int | None]] = [(document, 0, None) for document in documents[1:-1]]
        return [(documents[0], start, None), *middle, (documents[-1], 0, stop + 1)]


def num_rows(num_tokens: int, seq_len: int) -> int:
    """Rows of an epoch. Neighbours share a token: the last label of a row is the first token of the next. What is left over is left out."""
    return max(0, num_tokens - 1) // seq_len


def epoch_seed(seed: int, split: str, epoch: int) -> int:
    """A 32-bit seed that is unrelated for different arguments."""
    return int.from_bytes(hashlib.sha256(f"{seed} {split} {epoch}".encode()).digest()[:4], "little")


def build_epoch(document_sizes: np.ndarray, seq_len: int, random_seed: int) -> Epoch:
    """document_sizes: tokens of each document of the split [documents]."""
    if document_sizes.max() > np.iinfo(np.int32).max:
        raise ConfigError(
            f"a document has {document_sizes.max()} tokens, more than {np.iinfo(np.int32).max}; split it before preparing the data."
        )
    random = np.random.RandomState(random_seed)  # its shuffle never changes between versions of numpy
    document_order = np.arange(len(document_sizes), dtype=np.int32)
    random.shuffle(document_order)
    tokens = int(document_sizes.sum(dtype=np.int64))
    row_starts = megatron.helpers().build_sample_idx(document_sizes.astype(np.int32), document_order, seq_len, 1, tokens, True, True)
    rows = len(row_starts) - 1
    row_order = np.arange(rows, dtype=np.uint32 if rows < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(row_order)
    return Epoch(document_order, row_starts, row_order)


def open_epoch(document_sizes: np.ndarray, seq_len: int, random_seed: int, cache: Path, data_key: str) -> Epoch:
    """`build_epoch`, memory-mapped from `cache` when it is large. data_key: hash of the data and the range of documents."""
    rows = num_rows(int(document_sizes.sum(dtype=np.int64)), seq_len)
    if max(rows, len(document_sizes)) <= CACHED_ABOVE:
        return build_epoch(document_sizes, seq_len, random_seed)

    def build(folder: Path) -> None:
        epoch = build_epoch(document_sizes, seq_len, random_seed)
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(epoch, name))

    key = hashlib.sha256(f"{data_key} {seq_len} {random_seed}".encode()).hexdigest()[:16]
    folder = build_once(cache / "epochs" / key, build)
    return Epoch(*(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS))
