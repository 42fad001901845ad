"""Which documents the inputs hold, cut into chunks of about one megabyte that a worker process can tokenize on its own.

text (also .gz, .zst)      one document a file
JSON lines (.jsonl …)      one document a line, under `text_key`
Parquet                    one document a row, column `text_key`
Hugging Face data set      one document a row, as written by `Dataset.save_to_disk`
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from moe_train.config import ConfigError

JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
PARQUET = frozenset({".parquet"})
PLAIN = frozenset({".txt", ".text", ".md", ".rst", ".py"})
COMPRESSED = frozenset({".gz", ".zst"})
CHUNK_BYTES = 1 << 20
READ_BYTES = 1 << 17
ROWS_A_CHUNK = 2048


@dataclass
class Chunk:
    """A piece of work. kind: text, lines, parquet or dataset; source_bytes: how far it moves the progress bar.

    paths: files (text), or the one file or folder; lines: raw JSON lines with their first line number (from 1); rows: [start, stop) of a
    parquet row group or of a data set.
    """

    kind: str
    paths: list[str]
    source_bytes: int
    lines: list[bytes] = field(default_factory=list)
    first_line: int = 0
    row_group: int = 0
    rows: tuple[int, int] = (0, 0)


def find_inputs(inputs: list[str], pattern: str | None) -> list[Path]:
    """Files and data-set folders in a fixed order: a file stands for itself, a folder for the files below it that match `pattern` (None:
    the suffixes that are known), sorted by name; empty files below a folder are left out."""
    found: list[Path] = []
    for name in inputs:
        path = Path(name).expanduser()
        if path.is_file() or is_dataset(path):
            found.append(path)
        elif path.is_dir():
            below = sorted(
                file
                for file in path.rglob(pattern or "*")
                if file.is_file() and (pattern or _kind_or_none(file)) and file.stat().st_size > 0
            )
            if not below:
                wanted = (
                    f"match {pattern}" if pattern else f"end in {', '.join(sorted(JSON_LINES | PARQUET | PLAIN))} (also with .gz, .zst)"
                )
                raise ConfigError(f"no files below {path} that {wanted} and are not empty. Name the files, or choose others with --glob.")
            found.extend(below)
        else:
            raise ConfigError(f"{path} does not exist. Give files, folders, or folders written by Dataset.save_to_disk.")
    for path in found:
        if path.is_file() and path.stat().st_size == 0:
            raise ConfigError(f"{path} is empty (0 bytes). Remove it from the inputs.")
    return found


def is_dataset(path: Path) -> bool:
    """Whether `path` is a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    single = (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    return single or (path / "dataset_dict.json").is_file()


def _kind_or_none(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    inner = (suffixes[:-1] if suffixes and suffixes[-1] in COMPRESSED else suffixes)[-1:]
    if not inner:
        return None
    if inner[0] in JSON_LINES:
        return "lines"
    if inner[0] in PARQUET:
        return "parquet"
    return "text" if inner[0] in PLAIN else None


def kind_of(path: Path) -> str:
    """dataset, lines, parquet or text (any suffix that is not known)."""
    return "dataset" if path.is_dir() else _kind_or_none(path) or "text"


def source_size(path: Path) -> int:
    """Bytes on disk of a file, or of all files of a data-set folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size


def chunks(paths: list[Path], limit_each: int | None = None) -> Iterator[Chunk]:
    """The chunks of all inputs in order. limit_each: stop each input after about this many bytes (a sample of the corpus)."""
    texts: list[Path] = []
    size = 0
    for path in paths:
        kind = kind_of(path)
        if kind == "text":
            texts.append(path)
            size += source_size(path)
        if texts and (kind != "text" or size >= CHUNK_BYTES):
            yield Chunk("text", [str(text) for text in texts], size)
            texts, size = [], 0
        if kind != "text":
            yield from _limited(_CHUNKERS[kind](path), limit_each)
    if texts:
        yield Chunk("text", [str(text) for text in texts], size)


def _limited(pieces: Iterator[Chunk], limit: int | None) -> Iterator[Chunk]:
    seen = 0
    for piece in pieces:
        yield piece
        seen += max(piece.source_bytes, sum(map(len, piece.lines)))
        if limit is not None and seen >= limit:
            return


def _line_chunks(path: Path) -> Iterator[Chunk]:
    lines: list[bytes] = []
    number = size = before = 0
    with open_bytes(path) as (stream, raw):
        for line in stream:
            number += 1
            lines.append(line)
            size += len(line)
            if size >= CHUNK_BYTES:
                yield Chunk("lines", [str(path)], raw.tell() - before, lines, number - len(lines) + 1)
                lines, size, before = [], 0, raw.tell()
        if lines:
            yield Chunk("lines", [str(path)], raw.tell() - before, lines, number - len(lines) + 1)


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    with open_parquet(path) as file:
        size = path.stat().st_size / max(1, file.metadata.num_rows)
        for group in range(file.metadata.num_row_groups):
            for start, stop in _row_ranges(file.metadata.row_group(group).num_rows):
                yield Chunk("parquet", [str(path)], int(size * (stop - start)), row_group=group, rows=(start, stop))


def _dataset_chunks(path: Path) -> Iterator[Chunk]:
    dataset = open_dataset(path)
    size = source_size(path) / max(1, len(dataset))
    for start, stop in _row_ranges(len(dataset)):
        yield Chunk("dataset", [str(path)], int(size * (stop - start)), rows=(start, stop))


_CHUNKERS = {"lines": _line_chunks, "parquet": _parquet_chunks, "dataset": _dataset_chunks}


def _row_ranges(num_rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_rows, ROWS_A_CHUNK):
        yield start, min(start + ROWS_A_CHUNK, num_rows)


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(decompressed stream, file on disk). Errors of reading become ConfigError."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw)), raw
            elif path.suffix == ".zst":
                yield io.BufferedReader(_zstd_reader(path, raw)), raw
            else:
                yield raw, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is damaged or truncated: {error}. Fetch or compress it again.") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from None


def _zstd_reader(path: Path, raw: IO[bytes]) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ConfigError(f"{path} needs the package zstandard: pip install 'moe-train[data]'.") from None

    class Reader(io.RawIOBase):
        """Frame after frame; unlike zstandard's own reader it notices that the last frame is cut off."""

        def __init__(self) -> None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._packed = self._plain = b""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            while not self._plain:
                self._packed = self._packed or raw.read(READ_BYTES)
                if not self._packed:
                    if not self._frame.eof:
                        raise EOFError("the last frame is incomplete")
                    return 0
                if self._frame.eof:
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    self._plain = self._frame.decompress(self._packed)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                self._packed = self._frame.unused_data if self._frame.eof else b""
            size = min(len(buffer), len(self._plain))
            buffer[:size], self._plain = self._plain[:size], self._plain[size:]
            return size

    return Reader()


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A pyarrow ParquetFile."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(f"{path} needs the package pyarrow: pip install 'moe-train[data]'.") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} is not a readable Parquet file: {error}.") from None


def open_dataset(path: Path) -> Any:
    """A Hugging Face Dataset from disk."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(f"{path} is a Hugging Face data set and needs the package datasets: pip install 'moe-train[data]'.") from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable Hugging Face data set: {error}.") from None
    if isinstance(loaded, datasets.DatasetDict):
        raise ConfigError(f"{path} holds the splits {', '.join(loaded)}; name one of them, for example {path / next(iter(loaded))}.")
    return loaded
