"""The batch number n of a config: an endless deterministic stream of packed rows, read at random access.

Law: the stream depends on (data config, seed) only, never on train.steps, batch sizes or ranks, so that a resumed run, and a run on
another layout, continue with exactly the next row. The reader's state is one integer, the number of rows read.

Shape suffixes: B rows, T tokens a row.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from moe_train.config import Config, ConfigError
from moe_train.config.errors import require_choice
from moe_train.config.run import DATA_KINDS
from moe_train.data.blend import Blend, check_weights
from moe_train.data.epoch import Epoch, epoch_seed, num_rows, open_epoch
from moe_train.data.indexed import TokenFile
from moe_train.data.split import SPLITS, parse_split, split_documents
from moe_train.data.stdlib import prepare_stdlib
from moe_train.data.store import cache_root
from moe_train.data.tokenizer import KNOWN_ENDS, check_vocab, load_tokenizer, tokenizer_hash, vocab_size
from moe_train.data.writer import part
from moe_train.model.batch import IGNORE, Batch

STREAM_VERSION = 1
"""Raised when the same config would give other rows, so that an old checkpoint is refused rather than continued with other data."""
EVALUATION_SEED = 0
"""Validation and test rows are the same for every seed, so that runs compare."""
EPOCHS_IN_MEMORY = 4
DECODED_TOKENS = 1_000_000
"""Without PREFIX.bytes.npy the bytes per token are measured by decoding this many tokens."""


class Source:
    """One split of one pair: an endless stream of rows, epoch after epoch."""

    def __init__(self, file: TokenFile, documents: range, seq_len: int, seed: int, split: str, cache: Path):
        self.file, self.documents, self.seq_len = file, documents, seq_len
        self.sizes = file.document_sizes[documents.start : documents.stop]
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))
        self.rows = num_rows(self.num_tokens, seq_len)
        self._seed, self._split, self._cache = seed, split, cache
        self.epoch = lru_cache(maxsize=EPOCHS_IN_MEMORY)(self._open_epoch)

    def _open_epoch(self, number: int) -> Epoch:
        key = f"{self.file.fingerprint} {self.documents.start} {self.documents.stop}"
        return open_epoch(self.sizes, self.seq_len, epoch_seed(self._seed, self._split, number), self._cache, key)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and document numbers (0, 1, … along the row) of row `number`, int64 [T + 1] each."""
        epoch, index = divmod(number, self.rows)
        tokens, documents = [], []
        for order, (document, start, length) in enumerate(self.epoch(epoch).spans(index)):
            length = int(self.sizes[document]) - start if length is None else length
            tokens.append(self.file.read(self.documents.start + document, start, length))
            documents.append(np.full(length, order, dtype=np.int64))
        return np.concatenate(tokens).astype(np.int64), np.concatenate(documents)

    def bytes_per_token(self, tokenizer: Tokenizer) -> float:
        """UTF-8 bytes of the text of the split divided by all its tokens, end-of-document tokens included."""
        if self.file.document_bytes is not None:
            return int(self.file.document_bytes[self.documents.start : self.documents.stop].sum()) / max(1, self.num_tokens)
        tokens = num_bytes = 0
        for document in self.documents:
            ids = self.file.read(document, 0, int(self.file.document_sizes[document])).tolist()
            tokens, num_bytes = tokens + len(ids), num_bytes + len(tokenizer.decode(ids, skip_special_tokens=True).encode("utf-8"))
            if tokens >= DECODED_TOKENS:
                break
        return num_bytes / max(1, tokens)


class SampleStream:
    """Rows of one split. `batch(start, count)` is a pure function: rows start … start + count - 1.

    num_sequences: rows of one epoch (train), or all rows there are (valid, test); fingerprint: hash of everything the rows depend on;
    bytes_per_token: UTF-8 bytes of the split's text for each of its tokens, end-of-document tokens counted, weighted as blended.
    """

    def __init__(self, split: str, sources: list[Source], blend: Blend, tokenizer: Tokenizer, fingerprint: str, eod_id: int | None):
        self.split, self.sources, self.blend = split, sources, blend
        self.tokenizer, self.fingerprint, self.eod_id = tokenizer, fingerprint, eod_id
        self.finite = split != "train"
        used = [source for source, count in zip(sources, blend.counts, strict=True) if count]
        self.num_sequences = blend.rows_without_repetition() if self.finite else sum(source.rows for source in used)
        self.num_tokens = sum(source.num_tokens for source in used)
        self._vocab_size = vocab_size(tokenizer)
        self._position = 0

    @cached_property
    def bytes_per_token(self) -> float:
        pairs = zip(self.blend.counts, self.sources, strict=True)
        used = [(count, source.bytes_per_token(self.tokenizer)) for count, source in pairs if count]
        return sum(count * value for count, value in used) / sum(count for count, _ in used)

    def batch(self, start: int, count: int) -> Batch:
        """Rows start … start + count - 1 as a Batch of [count, T] on the CPU. The last label of a row is the token that follows it."""
        if start < 0 or count < 1:
            raise ValueError(f"rows {start} … {start + count - 1} do not exist")
        if self.finite and start + count > self.num_sequences:
            raise ConfigError(
                f"rows {start} … {start + count - 1} of the {self.split} split are wanted, but it has {self.num_sequences}; use fewer."
            )
        rows = [self._row(position) for position in range(start, start + count)]
        tokens_BT1 = torch.from_numpy(np.stack([tokens for tokens, _ in rows]))
        documents_BT1 = torch.from_numpy(np.stack([documents for _, documents in rows]))
        same_BT = documents_BT1[:, 1:] == documents_BT1[:, :-1]
        labels_BT = torch.where(same_BT, tokens_BT1[:, 1:], IGNORE)
        self._position = start + count
        return Batch(tokens_BT1[:, :-1].contiguous(), labels_BT, documents_BT1[:, :-1].contiguous())

    def _row(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        index, number = self.blend.locate(position)
        source = self.sources[index]
        tokens, documents = source.row(number)
        worst = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        if not 0 <= worst < self._vocab_size:
            raise ConfigError(
                f"{source.file.prefix}.bin holds token {worst}, but its tokenizer has ids 0 … {self._vocab_size - 1}: the data was made "
                "with another tokenizer. Set data.tokenizer."
            )
        return tokens, documents

    def prepare_epoch(self, epoch: int) -> None:
        """Build (and cache, when it is large) the order of this epoch of every data set, as the first batch that needs it would."""
        for source, count in zip(self.sources, self.blend.counts, strict=True):
            if count:
                source.epoch(epoch)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the row after the last batch, and the fingerprint that `check_state` compares."""
        return {"position": self._position, "epoch": self._position // self.num_sequences, "fingerprint": self.fingerprint}

    def check_state(self, state: dict[str, Any]) -> int:
        """The position to continue from. Raises ConfigError when the rows of `state` are not those of this stream."""
        if state.get("fingerprint") != self.fingerprint:
            raise ConfigError(
                f"the checkpoint was trained on other data (fingerprint {str(state.get('fingerprint'))[:12]}, now "
                f"{self.fingerprint[:12]}): data.*, the seed or the files changed. Restore them, or start a new run with another run.dir."
            )
        self._position = int(state["position"])
        return self._position


def build_data(config: Config, split: str) -> SampleStream:
    """The stream of `split` (train, valid, test) that config.data and config.seed describe. Raises ConfigError for what a user can fix."""
    require_choice("split", split, SPLITS)
    data = config.data
    if data.seq_len < 2:
        raise ConfigError(f"data.seq_len={data.seq_len} is too short; a row needs at least 2 tokens.")
    prefixes = _prefixes(config)
    check_weights(data.weights, prefixes)
    files = [TokenFile(prefix) for prefix in prefixes]
    tokenizer = _tokenizer(config, files)
    check_vocab(tokenizer, config.model.vocab_size)
    seed = config.seed if split == "train" else EVALUATION_SEED
    cache = cache_root(data.cache_dir)
    sources = [Source(file, split_documents(file.document_sizes, data.split)[split], data.seq_len, seed, split, cache) for file in files]
    _check_rows(config, split, sources)
    blend = Blend([source.rows for source in sources], data.weights)
    identity = [
        STREAM_VERSION,
        [file.fingerprint for file in files],
        tokenizer_hash(tokenizer),
        parse_split(data.split),
        data.seq_len,
        None if data.weights is None else [weight / sum(data.weights) for weight in data.weights],
        seed,
        split,
    ]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return SampleStream(split, sources, blend, tokenizer, fingerprint, _eod_id(files, tokenizer))


def _prefixes(config: Config) -> list[str]:
    data = config.data
    require_choice("data.kind", data.kind, DATA_KINDS)
    without_effect = ("paths", "weights", "tokenizer") if data.kind == "python_stdlib" else ("max_bytes",)
    for name in without_effect:
        if getattr(data, name):
            raise ConfigError(f"data.{name}={getattr(data, name)} has no effect with data.kind={data.kind}; remove it or change data.kind.")
    if data.kind == "python_stdlib":
        return [str(prepare_stdlib(data))]
    if not data.paths:
        raise ConfigError("data.kind=indexed needs data.paths: prefixes of .bin/.idx pairs made by `moe-train prepare-data`.")
    return [str(Path(path).expanduser()) for path in data.paths]


def _tokenizer(config: Config, files: list[TokenFile]) -> Tokenizer:
    hashes = {file.prefix: file.meta["tokenizer_sha256"] for file in files if "tokenizer_sha256" in file.meta}
    if len(set(hashes.values())) > 1:
        raise ConfigError(
            f"data.paths were made with {len(set(hashes.values()))} different tokenizers ({', '.join(hashes)}). "
            "Prepare them again with one."
        )
    if config.data.kind == "indexed" and config.data.tokenizer is not None:
        tokenizer = load_tokenizer(config.data.tokenizer)
        made_with = next(iter(hashes.values()), None)
        if made_with is not None and made_with != tokenizer_hash(tokenizer):
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer} is not the tokenizer that {next(iter(hashes))} was made with; "
                "leave data.tokenizer empty to take the one beside the data."
            )
        return tokenizer
    beside = part(files[0].prefix, ".tokenizer.json")
    return load_tokenizer(beside if beside.is_file() else Path(files[0].prefix).parent)


def _eod_id(files: list[TokenFile], tokenizer: Tokenizer) -> int | None:
    """The appended end-of-document token; for a pair made by another program the one its tokenizer is known to use."""
    if files[0].meta:
        return files[0].meta.get("eod_id")
    return next((tokenizer.token_to_id(name) for name in KNOWN_ENDS if tokenizer.token_to_id(name) is not None), None)


def _check_rows(config: Config, split: str, sources: list[Source]) -> None:
    """Every data set that the blend uses must fill at least one row."""
    data = config.data
    for index, source in enumerate(sources):
        wanted = data.weights is None or data.weights[index] > 0
        if wanted and source.rows == 0 and (data.weights is not None or sum(other.rows for other in sources) == 0):
            raise ConfigError(
                f"the {split} split of {source.file.prefix} has {len(source.documents)} of {source.file.num_documents} documents and "
                f"{source.num_tokens} tokens (data.split={data.split}), too few for one row of data.seq_len={data.seq_len} and its last "
                "label. Use more data, a shorter data.seq_len, or a larger share in data.split."
            )
