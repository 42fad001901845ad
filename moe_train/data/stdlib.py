"""The embedded corpus: source and docstrings of the running Python's standard library (about 31 MB with its tests), tokenized on first use.

From nothing it takes about 6 s on two cores; afterwards the folder in the cache is opened. The key of the folder covers the Python version,
the name and size of every file and the settings, so that another Python never reads it.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from moe_train.config import ConfigError, DataConfig
from moe_train.data.progress import Progress
from moe_train.data.store import build_once, cache_root
from moe_train.data.tokenizer import END_OF_TEXT, plain_text_encoder, train_bpe
from moe_train.data.writer import FORMAT, TokenWriter

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
BPE_SAMPLE_BYTES = 6_000_000
"""The vocabulary is trained on about this much of the corpus: 0.8 s rather than 4 s, and within 1 % as few tokens."""
LARGEST_BPE_FILE = 200_000
"""Tables of data (pydoc topics, Unicode tests) would fill the vocabulary with their repetitions."""
ENCODE_BATCH = 64
"""Documents handed to the tokenizer's threads at once."""


def prepare_stdlib(config: DataConfig) -> Path:
    """Prefix of the `.bin/.idx` pair of the standard library, built in the cache unless it is there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = corpus_files(root, config.max_bytes)
    listing = "\n".join(f"{name} {size}" for name, size in files)
    key = hashlib.sha256(f"{FORMAT} {sys.version} {config.vocab_size} {BPE_SAMPLE_BYTES}\n{listing}".encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        _write(folder / "tokens", root, files, config)

    return build_once(cache_root(config.cache_dir) / f"python_stdlib-{key}", build) / "tokens"


@cache
def corpus_files(root: Path, max_bytes: int | None) -> list[tuple[str, int]]:
    """(relative name, bytes) of the sources, shuffled by a hash of their names; with `max_bytes` the files of this order that fit into it.

    The order depends on the names alone, so a contiguous range of documents (a split) is a fair sample of all packages.
    """
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.is_file():
            files.append((relative.as_posix(), path.stat().st_size))
    files = sorted((file for file in files if file[1] > 0), key=lambda file: hashlib.sha256(file[0].encode()).digest())
    if not files:
        raise ConfigError(
            f"no Python source below {root}; this Python has no standard library as text. Use data=indexed with your own files."
        )
    if max_bytes is None:
        return files
    kept, total = [], 0
    for name, size in files:
        if total + size <= max_bytes:
            kept.append((name, size))
            total += size
    if not kept:
        smallest = min(size for _, size in files)
        raise ConfigError(
            f"data.max_bytes={max_bytes} is smaller than every file of the standard library (smallest: {smallest} bytes); raise it."
        )
    return kept


def _texts(root: Path, files: list[tuple[str, int]]) -> Iterator[str]:
    """The texts that are UTF-8 (a few test files of other encodings are left out)."""
    for name, _ in files:
        try:
            yield (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


def _write(prefix: Path, root: Path, files: list[tuple[str, int]], config: DataConfig) -> None:
    texts = list(_texts(root, files))
    with Progress("preparing the standard library", len(texts) + 1, "files") as progress:
        tokenizer = train_bpe(_bpe_sample(texts), config.vocab_size)
        progress.advance(1)
        source = {"kind": "python_stdlib", "python": sys.version, "files": len(texts), "max_bytes": config.max_bytes}
        with TokenWriter(prefix, tokenizer, END_OF_TEXT, source) as writer:
            encoder = plain_text_encoder(tokenizer.to_str())
            for start in range(0, len(texts), ENCODE_BATCH):
                batch = texts[start : start + ENCODE_BATCH]
                for text, encoding in zip(batch, encoder.encode_batch_fast(batch, add_special_tokens=False), strict=True):
                    writer.add(encoding.ids, len(text.encode("utf-8")))
                progress.advance(len(batch))


def _bpe_sample(texts: list[str]) -> Iterator[str]:
    total = 0
    for text in texts:
        if len(text) <= LARGEST_BPE_FILE and total < BPE_SAMPLE_BYTES:
            total += len(text)
            yield text
