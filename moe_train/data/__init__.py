"""From text to an endless, resumable stream of packed rows: tokenizers, `.bin/.idx` files of megatron-core, splits, epochs, blends.

Modules from the bottom up: `store` (build once, atomically), `megatron` (the lazy and quiet import), `tokenizer`, `writer` (tokens to a
pair of files), `sources` (which documents a file holds), `tokenize` (documents to tokens, in a worker), `prepare` (many files in parallel),
`stdlib` (the embedded corpus), `indexed` (a pair of files as documents), `split`, `epoch` (the order of one epoch), `blend` (which data set
is next), `stream` (the batch number n).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_train.data.stream import SampleStream, build_data
    from moe_train.data.tokenizer import check_vocab

__all__ = ["SampleStream", "build_data", "check_vocab"]


def __getattr__(name: str) -> Any:
    # Lazy: the worker processes of `prepare` import this package, and importing torch in each would cost more than a second.
    if name == "check_vocab":
        from moe_train.data import tokenizer as module
    elif name in __all__:
        from moe_train.data import stream as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
