"""Blends: exact counts, the bound inside a round, agreement with megatron-core's own data sets."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_train.config import ConfigError
from moe_train.data import build_data, megatron
from moe_train.data.blend import ROUND, Blend, check_weights
from moe_train.data.epoch import epoch_seed
from moe_train.data.stream import EVALUATION_SEED


def test_whole_rounds_give_exact_counts_and_every_row_in_turn() -> None:
    blend = Blend([10, 7, 1000], [0.5, 0.25, 0.25])
    assert blend.counts == [ROUND // 2, ROUND // 4, ROUND // 4]
    next_row = [0, 0, 0]
    for position in range(2 * ROUND):
        source, row = blend.locate(position)
        assert row == next_row[source]  # no row is skipped or repeated, the border between rounds included
        next_row[source] += 1
    assert next_row == [2 * count for count in blend.counts]


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
def test_shares_are_within_one_row_of_the_weights_at_the_end_of_a_round_and_two_inside(weights: list[float]) -> None:
    blend = Blend([5] * len(weights), weights)
    shares = np.array(weights) / sum(weights)
    assert sum(blend.counts) == ROUND
    assert np.abs(np.array(blend.counts) - shares * ROUND).max() < 1 + 1e-6
    given_out = np.cumsum(np.eye(len(weights))[[blend.locate(position)[0] for position in range(3000)]], axis=0)
    assert np.abs(given_out - np.arange(1, 3001)[:, None] * shares).max() < 2


def test_blend_by_size_reads_every_row_of_every_data_set_once_a_round_evenly_mixed() -> None:
    blend = Blend([30, 0, 10], None)
    assert blend.counts == [30, 0, 10]
    assert blend.length == 40
    for start in (0, 40):
        places = [blend.locate(position) for position in range(start, start + 40)]
        assert Counter(source for source, _ in places) == {0: 30, 2: 10}
        assert len(set(places)) == 40
    assert all(sum(blend.locate(p)[0] == 2 for p in range(start, start + 8)) in (1, 2, 3) for start in range(0, 32, 8))


def test_weight_zero_leaves_a_data_set_out(make_pair, indexed_config) -> None:
    paths = [make_pair("a", [9] * 9), make_pair("tiny", [1])]
    stream = build_data(indexed_config(paths, weights=[2.0, 0.0]), "train")
    alone = build_data(indexed_config(paths[:1]), "train")
    assert stream.num_sequences == alone.num_sequences
    assert stream.batch(0, 30).tokens_BT.tolist() == alone.batch(0, 30).tokens_BT.tolist()
    assert stream.bytes_per_token == alone.bytes_per_token


def test_blended_stream_has_the_exact_counts_of_its_weights(make_pair, indexed_config) -> None:
    """Tokens 1-100 come from a, 101-200 from b: 3 of 4 rows are a's in every stretch of four."""
    paths = [make_pair("a", [8] * 12, eod=None), make_pair("b", [8] * 12, first=101, eod=None)]
    stream = build_data(indexed_config(paths, weights=[3.0, 1.0]), "train")
    assert build_data(indexed_config(paths, weights=[6.0, 2.0]), "train").fingerprint == stream.fingerprint
    assert build_data(indexed_config(paths, weights=[3.0, 2.0]), "train").fingerprint != stream.fingerprint
    of_a = [row[0] <= 100 for row in stream.batch(0, 400).tokens_BT.tolist()]
    assert sum(of_a) == 300
    assert all(sum(of_a[start : start + 4]) == 3 for start in range(0, 400, 4))


def test_evaluation_of_a_blend_keeps_the_weights_and_repeats_no_row(make_pair, indexed_config) -> None:
    paths = [make_pair("a", [8] * 31, eod=None), make_pair("b", [8] * 31, first=2, eod=None)]
    stream = build_data(indexed_config(paths, weights=[3.0, 1.0], split="0,100,0"), "valid")
    assert stream.num_sequences == 40  # 30 rows of a and 10 of b: then a would begin again
    places = [stream.blend.locate(position) for position in range(40)]
    assert len(set(places)) == 40
    assert stream.blend.locate(40) == (0, 30)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 numbers for 2 data.paths"),
        ([1.0, -0.5], "-0.5 for b"),
        ([float("nan"), 1.0], "nan for a"),
        ([float("inf"), 1.0], "inf for a"),
        ([0.0, 0.0], "sum to zero"),
        ([1.0, 1e-9], "below the resolution"),
    ],
)
def test_bad_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_weights(weights, ["a", "b"])


def gpt_datasets(paths: list[str], seq_len: int, seed: int, cache: str) -> list:
    """megatron-core's GPTDataset of exactly one epoch for each path."""
    megatron.indexed_dataset()
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    tokenizer = SimpleNamespace(vocab_size=300, eod=0, pad=-1, unique_identifiers={"class": "test"})
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([paths[0]], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    data_sets = []
    for path in paths:
        low = GPTDataset.build_low_level_dataset(path, config)
        documents = np.arange(len(low), dtype=np.int32)
        data_sets.append(GPTDataset(low, path, documents, None, Split.train, config))
    return data_sets


@pytest.mark.oracle
@pytest.mark.parametrize("number", [0, 1, 5])
def test_an_epoch_equals_megatron_gpt_dataset(make_pair, indexed_config, tmp_path, number: int) -> None:
    prefix = make_pair("a", [5, 1, 30, 7, 12, 2, 19, 8, 40, 3, 3, 3, 11])
    config = indexed_config([prefix])
    stream = build_data(config, "train")
    (judge,) = gpt_datasets([prefix], 8, epoch_seed(config.seed, "train", number), str(tmp_path / "judge"))
    assert len(judge) == stream.num_sequences
    batch = stream.batch(number * len(judge), len(judge))
    for index in range(len(judge)):
        assert batch.tokens_BT[index].tolist() == judge[index]["tokens"].tolist()
        same = batch.labels_BT[index] != -100
        assert batch.labels_BT[index][same].tolist() == judge[index]["labels"][same].tolist()


@pytest.mark.oracle
def test_a_blend_equals_megatron_blended_dataset(make_pair, indexed_config, tmp_path) -> None:
    from megatron.core.datasets.blended_dataset import BlendedDataset

    paths = [make_pair("a", [9] * 30), make_pair("b", [31] * 4), make_pair("c", [3] * 50)]
    weights = [0.6, 0.1, 0.3]
    config = indexed_config(paths, weights=weights, split="0,100,0")
    stream = build_data(config, "valid")
    parts = gpt_datasets(paths, 8, epoch_seed(EVALUATION_SEED, "valid", 0), str(tmp_path / "judge"))
    parts[0].config.path_to_cache = None  # its blended index otherwise asks for a process group
    judge = BlendedDataset(parts, weights, stream.num_sequences, parts[0].config)
    for index, row in enumerate(stream.batch(0, stream.num_sequences).tokens_BT.tolist()):
        assert row == judge[index]["tokens"].tolist()
