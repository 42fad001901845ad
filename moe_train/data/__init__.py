"""From text to an endless, resumable stream of packed rows: tokenizers, `.bin/.idx` files of megatron-core, splits, epochs, blends.

Modules from the bottom up: `store` (build once, atomically), `megatron` (the lazy and quiet import), `tokenizer`, `sources` (documents of a file),
`writer` (tokens to a pair of files), `indexed` (a pair of files to documents), `epoch` (the order of one epoch), `blend` (which data set is next),
`stream` (the batch number n), `stdlib` (the embedded corpus), `prepare` (many files in parallel).
"""

from moe_train.data.stream import SampleStream, build_data
from moe_train.data.tokenizer import check_vocab

__all__ = ["SampleStream", "build_data", "check_vocab"]
