"""The bigram yardstick: probabilities that sum to one, the plain formula, and a discount chosen without the validation split."""

from __future__ import annotations

import numpy as np
import pytest

from moe_train.data.ngram import ADDED, DISCOUNTS, count_bigrams, fit_bigram

V = 7


def some_pairs(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, V - 2, count + 1) ** 2 % V
    return tokens[:-1], tokens[1:]


def test_probabilities_of_every_context_sum_to_one() -> None:
    bigram = count_bigrams(*some_pairs(200), V, 0.75)
    for context in range(V):
        assert bigram.probability(np.full(V, context), np.arange(V)).sum() == pytest.approx(1.0)


def test_equals_the_plain_formula() -> None:
    previous, following = some_pairs(60)
    discount = 0.6
    bigram = count_bigrams(previous, following, V, discount)
    seen = list(zip(previous.tolist(), following.tolist(), strict=True))
    kinds = set(seen)
    for u in range(V):
        total = sum(a == u for a, _ in seen)
        for w in range(V):
            continuation = (sum(b == w for _, b in kinds) + ADDED) / (len(kinds) + ADDED * V)
            expected = continuation
            if total:
                expected = max(seen.count((u, w)) - discount, 0) / total + discount * sum(a == u for a, _ in kinds) / total * continuation
            assert bigram.probability(np.array([u]), np.array([w]))[0] == pytest.approx(expected)


def test_learns_a_deterministic_chain() -> None:
    tokens = np.arange(700) % V
    assert fit_bigram(tokens[:-1], tokens[1:], V).loss(tokens[:-1], tokens[1:]) < 0.1


def test_chooses_the_discount_that_is_best_on_the_held_out_tenth() -> None:
    previous, following = some_pairs(500, seed=3)
    losses = [count_bigrams(previous[:450], following[:450], V, d).loss(previous[450:], following[450:]) for d in DISCOUNTS]
    assert fit_bigram(previous, following, V).discount == DISCOUNTS[int(np.argmin(losses))]
