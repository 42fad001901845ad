"""Real token files in temporary folders; the texts are the Zen of Python and sources of the standard library (PSF licence)."""

from __future__ import annotations

import codecs
import contextlib
import io
import json as json_package
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_train.config import Config
from moe_train.data.tokenizer import END_OF_TEXT, train_bpe
from moe_train.data.writer import TokenWriter

with contextlib.redirect_stdout(io.StringIO()):  # it prints itself on import, which would end up below pytest's last line
    import this

ZEN = codecs.decode(this.s, "rot13")
MakePair = Callable[..., str]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 300 tokens; <|endoftext|> is id 0."""
    return train_bpe([ZEN], 300)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Sixteen documents of the package json and of the Zen of Python."""
    folder = Path(json_package.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    return [*sources, *[line for line in ZEN.splitlines() if line][: 16 - len(sources)]]


@pytest.fixture
def make_pair(tmp_path: Path, tokenizer: Tokenizer) -> MakePair:
    """make_pair(name, lengths, first=1): a pair whose documents count upwards, so that a test knows each token; end token 0 appended."""

    def make(name: str, lengths: list[int], first: int = 1, eod: str | None = END_OF_TEXT) -> str:
        prefix = str(tmp_path / name)
        token = 0
        with TokenWriter(prefix, tokenizer, eod, {"kind": "test"}) as writer:
            for length in lengths:
                writer.add(np.array([first + (token + i) % 250 for i in range(length)]), num_bytes=3 * length)
                token += length
        return prefix

    return make


@pytest.fixture
def indexed_config(tmp_path: Path) -> Callable[..., Config]:
    """indexed_config(paths, **data fields): a config that reads these pairs."""

    def make(paths: list[str], **fields: object) -> Config:
        config = Config()
        config.data.kind, config.data.paths, config.data.cache_dir = "indexed", paths, str(tmp_path / "cache")
        config.data.seq_len, config.data.split = 8, "100,0,0"
        for name, value in fields.items():
            assert hasattr(config.data, name)
            setattr(config.data, name, value)
        return config

    return make
