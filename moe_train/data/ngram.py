"""An interpolated bigram model, the yardstick of the demo: what counting pairs of tokens achieves on the same training tokens.

Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999 §3): with c(u, w) the count of w after u, and a discount d,

    p(w | u) = max(c(u, w) − d, 0) / c(u) + d · N(u, ·) / c(u) · p_cont(w),   p_cont(w) = (N(·, w) + a) / (Σ N(·, ·) + a V)

where N counts distinct pairs. d is chosen on the last tenth of the training tokens, never on the validation split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DISCOUNTS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
ADDED = 0.1
"""a: mass of a token that was never seen, so that no probability is 0."""


@dataclass
class Bigram:
    """pairs: sorted keys u·V + w, int64; counts of each; context: tokens after u [V]; kinds: distinct tokens after u [V];
    continuation [V]."""

    vocab_size: int
    discount: float
    pairs: np.ndarray
    counts: np.ndarray
    context_V: np.ndarray
    kinds_V: np.ndarray
    continuation_V: np.ndarray

    def loss(self, previous: np.ndarray, following: np.ndarray) -> float:
        """Mean −log p(following | previous) in nats. Two int64 arrays of one length."""
        return float(-np.log(self.probability(previous, following)).mean())

    def probability(self, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
        keys = previous * self.vocab_size + following
        places = np.searchsorted(self.pairs, keys).clip(max=max(len(self.pairs) - 1, 0))
        found = np.where(self.pairs[places] == keys, self.counts[places], 0) if len(self.pairs) else np.zeros(len(keys))
        total = self.context_V[previous]
        backed = self.continuation_V[following]
        direct = np.maximum(found - self.discount, 0) + self.discount * self.kinds_V[previous] * backed
        return np.where(total > 0, direct / np.maximum(total, 1), backed)


def count_bigrams(previous: np.ndarray, following: np.ndarray, vocab_size: int, discount: float) -> Bigram:
    """Counts of all pairs (previous[i], following[i])."""
    pairs, counts = np.unique(previous * vocab_size + following, return_counts=True)
    context_V = np.bincount(previous, minlength=vocab_size)
    kinds_V = np.bincount(pairs // vocab_size, minlength=vocab_size)
    distinct_V = np.bincount(pairs % vocab_size, minlength=vocab_size)
    continuation_V = (distinct_V + ADDED) / (distinct_V.sum() + ADDED * vocab_size)
    return Bigram(vocab_size, discount, pairs, counts, context_V, kinds_V, continuation_V)


def fit_bigram(previous: np.ndarray, following: np.ndarray, vocab_size: int) -> Bigram:
    """The bigram model of these training pairs, with the discount that is best on their last tenth."""
    cut = max(1, len(previous) * 9 // 10)
    trial = count_bigrams(previous[:cut], following[:cut], vocab_size, 0.0)
    losses = {}
    for discount in DISCOUNTS:
        trial.discount = discount
        losses[discount] = trial.loss(previous[cut:], following[cut:]) if cut < len(previous) else 0.0
    return count_bigrams(previous, following, vocab_size, min(losses, key=losses.__getitem__))
