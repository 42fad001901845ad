"""Many files to one pair of tokens, in parallel and in a fixed order: the result does not depend on the number of workers."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from moe_train.config import ConfigError, RunError
from moe_train.data.progress import Progress
from moe_train.data.sources import Chunk, chunks, find_inputs, kind_of, source_size
from moe_train.data.tokenize import Encoded, Encoder, encode_in_worker, read_texts, spooled, start_worker
from moe_train.data.tokenizer import train_bpe
from moe_train.data.writer import TokenWriter, part

CHUNKS_AHEAD = 4
"""Chunks in flight for each worker: enough to keep it busy, few enough to bound memory."""
BPE_SAMPLE_BYTES = 64_000_000
"""A vocabulary is trained on about this much of the corpus, spread evenly over its files."""


@dataclass
class Prepared:
    """What was written."""

    prefix: str
    documents: int
    tokens: int
    bytes: int
    empty: int
    """Documents without text, left out."""


def prepare(
    inputs: list[str],
    prefix: str,
    tokenizer: Tokenizer | int,
    eod: str | None,
    text_key: str = "text",
    pattern: str | None = None,
    workers: int | None = None,
    force: bool = False,
) -> Prepared:
    """Tokenize `inputs` into PREFIX.bin, PREFIX.idx and their companions. tokenizer: ready, or the size of a BPE to train on the inputs."""
    paths = find_inputs(inputs, pattern)
    _check_output(prefix, force)
    try:
        with FileLock(f"{Path(prefix).parent / f'.{Path(prefix).name}.lock'}", timeout=0):
            if isinstance(tokenizer, int):
                tokenizer = train_bpe(sample_texts(paths, text_key), tokenizer)
            return _write(paths, prefix, tokenizer, eod, text_key, workers or os.cpu_count() or 1)
    except Timeout:
        raise ConfigError(f"another process is writing {prefix} right now; wait for it or choose another --output.") from None
    except PermissionError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}. Choose a writable --output.") from None
    except OSError as error:
        raise RunError(f"writing {prefix} failed: {error.strerror or error}. Nothing was left at {prefix}.") from None


def _check_output(prefix: str, force: bool) -> None:
    taken = [str(part(prefix, suffix)) for suffix in (".bin", ".idx") if part(prefix, suffix).exists()]
    if taken and not force:
        raise ConfigError(f"{' and '.join(taken)} exist already. Overwrite them with --force, or choose another --output.")
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {Path(prefix).parent}: {error.strerror}. Choose another --output.") from None


def sample_texts(paths: list[Path], text_key: str) -> Iterator[str]:
    """About BPE_SAMPLE_BYTES of the corpus: every n-th text file, and the first part of each file that holds many documents."""
    total = sum(map(source_size, paths))
    stride = max(1, total // BPE_SAMPLE_BYTES)
    chosen = [path for index, path in enumerate(paths) if kind_of(path) != "text" or index % stride == 0]
    left = min(BPE_SAMPLE_BYTES, total)
    with Progress("training the tokenizer", left, "bytes") as progress:
        for chunk in chunks(chosen, limit_each=max(1, BPE_SAMPLE_BYTES // max(1, len(chosen)))):
            for text in read_texts(chunk, text_key):
                left -= len(text)
                progress.advance(len(text))
                yield text
            if left <= 0:
                return


def _write(paths: list[Path], prefix: str, tokenizer: Tokenizer, eod: str | None, text_key: str, workers: int) -> Prepared:
    source: dict[str, Any] = {
        "kind": "files",
        "text_key": text_key,
        "files": [{"path": str(path), "bytes": source_size(path)} for path in paths],
    }
    empty = 0
    with (
        Progress("tokenizing", sum(file["bytes"] for file in source["files"]), "bytes") as progress,
        TokenWriter(prefix, tokenizer, eod, source) as writer,
    ):
        for chunk_bytes, (tokens, sizes, num_bytes, skipped) in _encoded(chunks(paths), tokenizer, text_key, workers):
            for document, size in zip(np.split(tokens, np.cumsum(sizes)[:-1]) if len(sizes) else [], num_bytes.tolist(), strict=True):
                writer.add(document, size)
            empty += skipped
            progress.advance(chunk_bytes)
        if not writer.num_bytes:
            raise ConfigError(f"the {len(paths)} inputs hold no text ({empty} empty documents). Nothing was written.")
    return Prepared(prefix, len(writer.num_bytes), writer.num_tokens, sum(writer.num_bytes), empty)


def _encoded(pieces: Iterator[Chunk], tokenizer: Tokenizer, text_key: str, workers: int) -> Iterator[tuple[int, Encoded]]:
    """(source bytes, encoded chunk) in the order of `pieces`."""
    if workers == 1:
        encode = Encoder(tokenizer.to_str(), text_key)
        for piece in pieces:
            yield piece.source_bytes, encode(piece)
        return
    # spawn: forking a process whose tokenizer or BLAS has started threads can hang the child. The tokenizer and the chunks go by file: what
    # is larger than a pipe's buffer (64 kB) would leave this process waiting for ever when the reader is killed (python/cpython 94777).
    folder = tempfile.TemporaryDirectory(prefix="moe_train-")
    tokenizer_file = str(Path(folder.name) / "tokenizer.json")
    tokenizer.save(tokenizer_file)
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(tokenizer_file, text_key))
    waiting: deque[tuple[int, Future[Encoded]]] = deque()
    try:
        for number, piece in enumerate(pieces):
            waiting.append((piece.source_bytes, _hand_in(pool, spooled(piece, Path(folder.name) / str(number)))))
            if len(waiting) >= workers * CHUNKS_AHEAD:
                size, future = waiting.popleft()
                yield size, future.result()
        while waiting:
            size, future = waiting.popleft()
            yield size, future.result()
    except BrokenProcessPool:
        # The pool ends the workers it had when it broke, then waits for all; one that was started at that moment would never end.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise RunError("a worker process died (killed, or out of memory). Try again with fewer --workers. Nothing was written.") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        folder.cleanup()


def _hand_in(pool: ProcessPoolExecutor, chunk: Chunk) -> Future[Encoded]:
    """`submit`, with one error for a broken pool. Around `submit` alone: reading a data set also raises OSErrors without a number."""
    try:
        return pool.submit(encode_in_worker, chunk)
    except OSError as error:
        # A pool that breaks while `submit` wakes it says "handle is closed", an OSError without a number (its pipe has no lock).
        if error.errno is not None:
            raise
        raise BrokenProcessPool(str(error)) from None
