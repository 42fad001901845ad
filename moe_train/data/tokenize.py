"""Documents to tokens in a worker process: reads a chunk, checks every document, encodes it. Imports neither torch nor megatron-core."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moe_train.config import ConfigError
from moe_train.data.sources import Chunk, open_bytes, open_dataset, open_parquet
from moe_train.data.tokenizer import plain_text_encoder

Encoded = tuple[np.ndarray, np.ndarray, np.ndarray, int]
"""Tokens of all documents of a chunk end to end, tokens of each, UTF-8 bytes of each, number of empty documents left out."""

_worker: dict[str, Any] = {}


def start_worker(tokenizer_file: str, text_key: str) -> None:
    """Initialiser of a worker process. Threads of the tokenizer are off: the processes are the parallelism."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker["encoder"] = Encoder(Path(tokenizer_file).read_text(encoding="utf-8"), text_key)


def encode_in_worker(chunk: Chunk) -> Encoded:
    return _worker["encoder"](unspooled(chunk))


def spooled(chunk: Chunk, path: Path) -> Chunk:
    """The chunk with its lines, or its paths, in a file at `path`: small enough for any pipe."""
    path.write_bytes(b"".join(chunk.lines) if chunk.lines else b"\0".join(map(os.fsencode, chunk.paths)))
    return replace(chunk, paths=[str(path), *([] if chunk.kind == "text" else chunk.paths)], lines=[])


def unspooled(chunk: Chunk) -> Chunk:
    """The chunk that `spooled` was given; its file is removed."""
    file, *paths = chunk.paths
    data = Path(file).read_bytes()
    os.unlink(file)
    if chunk.kind == "text":
        return replace(chunk, paths=[os.fsdecode(path) for path in data.split(b"\0")])
    return replace(chunk, paths=paths, lines=list(io.BytesIO(data)) if chunk.kind == "lines" else [])


class Encoder:
    """`encoder(chunk)` tokenizes its documents as plain text, without special tokens."""

    def __init__(self, tokenizer_json: str, text_key: str):
        self.tokenizer, self.text_key = plain_text_encoder(tokenizer_json), text_key

    def __call__(self, chunk: Chunk) -> Encoded:
        texts = list(read_texts(chunk, self.text_key))
        kept = [text for text in texts if text]
        ids = [np.array(encoding.ids, dtype=np.int32) for encoding in self.tokenizer.encode_batch_fast(kept, add_special_tokens=False)]
        tokens = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)
        sizes = np.array([len(document) for document in ids], dtype=np.int64)
        num_bytes = np.array([len(text.encode("utf-8")) for text in kept], dtype=np.int64)
        return tokens, sizes, num_bytes, len(texts) - len(kept)


def read_texts(chunk: Chunk, text_key: str) -> Iterator[str]:
    """The texts of a chunk, empty ones included. Raises ConfigError with file and line for whatever is no text."""
    path = Path(chunk.paths[0])
    if chunk.kind == "text":
        for name in chunk.paths:
            with open_bytes(Path(name)) as (stream, _):
                yield _decode(stream.read(), name)
    elif chunk.kind == "lines":
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if line.strip():
                yield _line_text(_decode(line.rstrip(b"\r\n"), f"{path} line {number}"), f"{path} line {number}", text_key)
    elif chunk.kind == "parquet":
        yield from _parquet_texts(path, chunk, text_key)
    else:
        start, stop = chunk.rows
        dataset = _dataset(str(path))
        _require_column(path, dataset.column_names, text_key)
        yield from _checked(dataset[start:stop][text_key], path, start, text_key)


_dataset = lru_cache(maxsize=4)(lambda path: open_dataset(Path(path)))


def _decode(raw: bytes, where: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}. Convert the file first, for example "
            "`iconv -f latin1 -t utf-8 IN > OUT`."
        ) from None
    return text.removeprefix("\ufeff")


def _line_text(line: str, where: str, text_key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not JSON: {error.msg} at column {error.colno}. Repair or delete this line (a JSON document over many lines must "
            "be written as one document a line)."
        ) from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is a JSON {type(record).__name__}, not an object with the key {text_key!r}.")
    if text_key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ConfigError(f"{where} has no key {text_key!r} (its keys: {keys}). Name the right one with --text-key.")
    return _text(record[text_key], where, text_key)


def _text(value: object, where: str, text_key: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {text_key!r} is {type(value).__name__}, not text. Remove the record or choose another --text-key.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {text_key!r} holds half a surrogate pair at character {error.start}, which no UTF-8 text has. Repair the record."
        ) from None
    return value


def _parquet_texts(path: Path, chunk: Chunk, text_key: str) -> Iterator[str]:
    start, stop = chunk.rows
    with open_parquet(path) as file:
        _require_column(path, file.schema_arrow.names, text_key)
        before = sum(file.metadata.row_group(group).num_rows for group in range(chunk.row_group))
        column = file.read_row_group(chunk.row_group, columns=[text_key]).column(text_key)
        yield from _checked(column.slice(start, stop - start).to_pylist(), path, before + start, text_key)


def _require_column(path: Path, columns: list[str], text_key: str) -> None:
    if text_key not in columns:
        raise ConfigError(f"{path} has no column {text_key!r} (its columns: {', '.join(columns)}). Name the right one with --text-key.")


def _checked(values: list[object], path: Path, first_row: int, text_key: str) -> Iterator[str]:
    for row, value in enumerate(values, first_row):
        yield _text(value, f"{path} row {row}", text_key)
