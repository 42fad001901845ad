"""Load, train and check tokenizers (`tokenizers.Tokenizer`), and find their end-of-document token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moe_train.config import ConfigError

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eod>", "</s>", "<eos>", "[EOS]", "<|return|>", "<|im_end|>")
"""End-of-document tokens tried in this order when tokenizer_config.json does not name one."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` file, of a folder that holds one, or of one that `transformers` converts (sentencepiece)."""
    path = Path(path).expanduser()
    if path.is_dir() and not (path / "tokenizer.json").is_file() and (path / "tokenizer_config.json").is_file():
        return _from_transformers(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"no tokenizer at {file}. Give a tokenizer.json, a folder that holds one (AutoTokenizer.save_pretrained writes it), "
            "or train one with `moe-train prepare-data --train-bpe VOCAB`."
        )
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not a tokenizer.json: byte {error.start} is not UTF-8.") from None
    except Exception as error:
        if (
            type(error) is not Exception
        ):  # tokenizers has no error class of its own: it raises bare Exception, and nothing else is caught here
            raise
        raise ConfigError(f"{file} is not a tokenizer.json of the `tokenizers` library: {error}.") from None


def _from_transformers(folder: Path) -> Tokenizer:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(
            f"{folder} has no tokenizer.json; reading it needs the package transformers: pip install 'moe-train[hf]'."
        ) from None
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, LookupError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers cannot read the tokenizer in {folder} (code in the folder is never run): {reason}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has no form of the `tokenizers` library; convert it to a tokenizer.json."
        )
    return backend


def end_token(tokenizer: Tokenizer, beside: Path | None = None) -> str:
    """The end-of-document token: eos_token of tokenizer_config.json in folder `beside`, else the first of KNOWN_ENDS it has."""
    config = beside / "tokenizer_config.json" if beside is not None else None
    names = list(KNOWN_ENDS)
    if config is not None and config.is_file():
        try:
            eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
            raise ConfigError(f"{config} is not JSON; remove or repair it.") from None
        eos = eos.get("content") if isinstance(eos, dict) else eos
        names = [eos, *names] if isinstance(eos, str) else names
    for name in names:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise ConfigError(
        f"the tokenizer has none of the end-of-document tokens {', '.join(names)}. Name one with --eod-token, or use --no-eod."
    )


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Id of the first of KNOWN_ENDS that the tokenizer has: where generation stops."""
    return next((id_ for id_ in map(tokenizer.token_to_id, KNOWN_ENDS) if id_ is not None), None)


def new_bpe() -> Tokenizer:
    """An untrained byte-level BPE (GPT-2's pre-tokenization): any text is coded without loss and without an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


SMALLEST_BPE = 256 + 1
"""One token for each byte and the end of text."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens, END_OF_TEXT (id 0) and all 256 bytes included."""
    if vocab_size < SMALLEST_BPE:
        raise ConfigError(
            f"a byte-level BPE needs at least {SMALLEST_BPE} tokens (256 bytes and {END_OF_TEXT}); vocabulary is {vocab_size}."
        )
    tokenizer = new_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def plain_text_encoder(tokenizer_json: str) -> Tokenizer:
    """A copy that encodes documents: `<|endoftext|>` written inside a text is coded as text, so no corpus can end a document."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id (ids may have gaps)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """sha256 of the tokenizer's canonical JSON."""
    return hashlib.sha256(tokenizer.to_str().encode("utf-8")).hexdigest()


def check_vocab(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raise ConfigError when the model has fewer embeddings than the tokenizer has ids (more is fine: tables are often padded)."""
    size = vocab_size(tokenizer)
    if model_vocab_size < size:
        raise ConfigError(
            f"model.vocab_size={model_vocab_size} is smaller than the tokenizer's vocabulary of {size}. "
            f"Set model.vocab_size={-(-size // 64) * 64} or use a smaller tokenizer."
        )
