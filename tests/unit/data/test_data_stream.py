"""The stream: rows against a plain reference, its law (data config and seed alone decide), document walls, splits, resume."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_train.config import Config, ConfigError
from moe_train.data import build_data, epoch, indexed
from moe_train.data.split import split_documents
from moe_train.data.writer import TokenWriter, part
from moe_train.model.batch import IGNORE, Batch

LENGTHS = [5, 1, 30, 7, 12, 2, 19, 8, 40, 3, 3, 3, 11]
SAME_FIXTURES = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows_of(stream, start: int, count: int) -> list[list[int]]:
    return stream.batch(start, count).tokens_BT.tolist()


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(Batch))


def reference_rows(prefix: str, seq_len: int, seed: int, number: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, document of each token) of every row of an epoch, T + 1 long: cut from the concatenated documents, without index tables."""
    file = indexed.TokenFile(prefix)
    state = np.random.RandomState(epoch.epoch_seed(seed, "train", number))
    order = np.arange(file.num_documents, dtype=np.int32)
    state.shuffle(order)
    tokens, owners = [], []
    for document in order.tolist():
        ids = file.read(document, 0, int(file.document_sizes[document])).tolist()
        tokens += ids
        owners += [document] * len(ids)
    count = (len(tokens) - 1) // seq_len
    shuffled = np.arange(count, dtype=np.uint32)
    state.shuffle(shuffled)
    spans = [slice(row * seq_len, row * seq_len + seq_len + 1) for row in shuffled.tolist()]
    return [(tokens[span], owners[span]) for span in spans]


def assert_equals_reference(prefix: str, config: Config, epochs: int) -> None:
    stream = build_data(config, "train")
    seq_len = config.data.seq_len
    expected = [row for number in range(epochs) for row in reference_rows(prefix, seq_len, config.seed, number)]
    assert len(expected) == epochs * stream.num_sequences
    batch = stream.batch(0, len(expected))
    assert batch.tokens_BT.dtype == batch.labels_BT.dtype == batch.document_ids_BT.dtype == torch.int64
    for index, (tokens, owners) in enumerate(expected):
        assert batch.tokens_BT[index].tolist() == tokens[:-1]
        labels = [tokens[i + 1] if owners[i] == owners[i + 1] else IGNORE for i in range(seq_len)]
        assert batch.labels_BT[index].tolist() == labels
        ids = batch.document_ids_BT[index].tolist()
        assert [a == b for a, b in itertools.pairwise(ids)] == [a == b for a, b in itertools.pairwise(owners[:-1])]
        assert ids == sorted(ids)
        assert ids[0] == 0


@pytest.mark.parametrize("seq_len", [2, 8, 33])
def test_rows_labels_and_documents_equal_a_plain_reference_over_three_epochs(make_pair, indexed_config, seq_len: int) -> None:
    prefix = make_pair("a", LENGTHS)
    assert_equals_reference(prefix, indexed_config([prefix], seq_len=seq_len), 3)


@SAME_FIXTURES
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), seq_len=st.integers(2, 20))
def test_any_documents_equal_the_plain_reference(make_pair, indexed_config, lengths: list[int], seq_len: int) -> None:
    prefix = make_pair("a", [*lengths, 21])
    assert_equals_reference(prefix, indexed_config([prefix], seq_len=seq_len), 2)


def test_every_token_of_an_epoch_is_read_once_but_for_the_rest(make_pair, indexed_config) -> None:
    """An epoch of n tokens has (n - 1) // T rows: 36 of 40 different tokens here."""
    prefix = make_pair("a", [1] * 40, eod=None)
    stream = build_data(indexed_config([prefix], seq_len=4), "train")
    assert stream.num_sequences == 39 // 4
    for number in range(3):
        seen = [token for row in rows_of(stream, number * 9, 9) for token in row]
        assert len(seen) == len(set(seen)) == 36


@SAME_FIXTURES
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12), start=st.integers(0, 60))
def test_rows_do_not_depend_on_how_they_are_batched(make_pair, indexed_config, cuts: list[int], start: int) -> None:
    stream = build_data(indexed_config([make_pair("a", LENGTHS), make_pair("b", [9, 40, 2])], weights=[0.7, 0.3]), "train")
    whole = stream.batch(start, sum(cuts))
    position, parts = start, []
    for count in cuts:
        parts.append(stream.batch(position, count))
        position += count
    for field in dataclasses.fields(Batch):
        assert torch.equal(getattr(whole, field.name), torch.cat([getattr(part, field.name) for part in parts]))


@SAME_FIXTURES
@given(steps=st.integers(1, 10**6), global_batch=st.integers(1, 64), micro_batch=st.integers(1, 64), every=st.integers(0, 9))
def test_rows_do_not_depend_on_steps_and_batch_sizes(
    make_pair, indexed_config, steps: int, global_batch: int, micro_batch: int, every: int
) -> None:
    config = indexed_config([make_pair("a", LENGTHS)])
    expected = build_data(config, "train")
    config.train.steps, config.train.global_batch, config.train.micro_batch, config.train.eval_every = (
        steps,
        global_batch,
        micro_batch,
        every,
    )
    stream = build_data(config, "train")
    assert stream.fingerprint == expected.fingerprint
    assert equal(stream.batch(0, 50), expected.batch(0, 50))


def test_resume_continues_with_the_exact_next_row_at_every_position_of_three_epochs(make_pair, indexed_config) -> None:
    config = indexed_config([make_pair("a", LENGTHS)])
    stream = build_data(config, "train")
    total = 3 * stream.num_sequences
    uninterrupted = rows_of(stream, 0, total)
    assert stream.num_sequences > 10
    for stop in range(1, total):
        seen = rows_of(stream, 0, stop)
        state = stream.state()
        assert state["epoch"] == stop // stream.num_sequences
        resumed = build_data(config, "train")
        position = resumed.check_state(state)
        assert seen + rows_of(resumed, position, total - stop) == uninterrupted
        assert resumed.state()["position"] == total


def test_epochs_are_shuffled_differently_and_hold_the_same_documents(make_pair, indexed_config) -> None:
    stream = build_data(indexed_config([make_pair("a", [7] * 32, eod=None)], seq_len=7), "train")
    n = stream.num_sequences
    first, second = rows_of(stream, 0, n), rows_of(stream, n, n)
    assert n == 31  # each row is one document; one of 32 lacks its last label
    assert first != second
    assert len({tuple(row) for row in first} & {tuple(row) for row in second}) >= 30


def test_seed_and_content_change_the_stream_and_its_fingerprint(make_pair, indexed_config) -> None:
    config = indexed_config([make_pair("a", LENGTHS)])
    base = build_data(config, "train")
    config.seed += 1
    other_seed = build_data(config, "train")
    assert other_seed.fingerprint != base.fingerprint
    assert rows_of(other_seed, 0, 10) != rows_of(base, 0, 10)
    config.seed -= 1
    config.data.paths = [make_pair("b", LENGTHS, first=2)]
    other_tokens = build_data(config, "train")
    assert other_tokens.fingerprint != base.fingerprint
    with pytest.raises(ConfigError, match="trained on other data"):
        other_tokens.check_state(base.state())


def test_a_copy_of_the_files_elsewhere_is_the_same_data(make_pair, indexed_config, tmp_path) -> None:
    prefix = make_pair("a", LENGTHS)
    (tmp_path / "copy").mkdir()
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        (tmp_path / "copy" / f"b{suffix}").write_bytes(part(prefix, suffix).read_bytes())
    here = build_data(indexed_config([prefix]), "train")
    there = build_data(indexed_config([str(tmp_path / "copy" / "b")]), "train")
    assert here.fingerprint == there.fingerprint
    assert equal(here.batch(0, 20), there.batch(0, 20))


def test_end_of_document_is_learnt_although_it_is_also_the_pad_token(make_pair, indexed_config) -> None:
    """Walls come from positions: the end token (id 0, which many tokenizers also use as padding) is the label of each last text token, and
    the token 0 inside a document is an ordinary token."""
    prefix = make_pair("a", [6] * 20)
    stream = build_data(indexed_config([prefix], seq_len=7 * 20 - 1), "train")
    batch = stream.batch(0, 1)
    tokens, labels = batch.tokens_BT[0].tolist(), batch.labels_BT[0].tolist()
    assert labels.count(0) == 20
    assert all(label == IGNORE for token, label in zip(tokens, labels, strict=True) if token == 0)
    assert batch.valid_BT.all()
    inside = make_pair("zero", [20] * 4, first=0, eod=None)
    batch = build_data(indexed_config([inside], seq_len=79), "train").batch(0, 1)
    assert int((batch.labels_BT == IGNORE).sum()) == 3
    assert batch.document_ids_BT.max() == 3


def test_no_label_crosses_a_document_wall_and_documents_restart_in_each_row(tmp_path, tokenizer, indexed_config) -> None:
    """Each document repeats a number of its own, so a label that differs from its token has crossed a wall."""
    prefix = str(tmp_path / "numbers")
    with TokenWriter(prefix, tokenizer, None, {}) as writer:
        generator = random.Random(0)
        for number in range(60):
            writer.add([number + 1] * generator.randint(1, 12), 1)
    batch = build_data(indexed_config([prefix]), "train").batch(0, 200)
    has_label = batch.labels_BT != IGNORE
    assert has_label.any()
    assert torch.equal(batch.labels_BT[has_label], batch.tokens_BT[has_label])
    ids, tokens = batch.document_ids_BT, batch.tokens_BT
    assert torch.equal(ids[:, 1:] == ids[:, :-1], tokens[:, 1:] == tokens[:, :-1])


def test_documents_of_several_sequences_stay_whole(tmp_path, tokenizer, indexed_config) -> None:
    """Files of other tools hold sentences as sequences and documents as groups of them; only a document's end is a wall."""
    from moe_train.data import megatron

    prefix = str(tmp_path / "sentences")
    builder = megatron.indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(np.arange(10, 20), [3, 7])
    builder.add_document(np.arange(30, 36), [1, 2, 3])
    builder.finalize(f"{prefix}.idx")
    tokenizer.save(f"{prefix}.tokenizer.json")
    stream = build_data(indexed_config([prefix], seq_len=15), "train")
    batch = stream.batch(0, 1)
    row = [*batch.tokens_BT[0].tolist(), int(batch.labels_BT[0, -1])]
    one, other = list(range(10, 20)), list(range(30, 36))
    assert row in (one + other, other + one)
    assert int((batch.labels_BT == IGNORE).sum()) == 1
    assert batch.document_ids_BT.max() == 1
    assert stream.bytes_per_token > 0


@pytest.mark.parametrize("split", ["98,2,0", "50,25,25", "1,0,1", "0,1,0", "0.5,0.5"])
@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_splits_are_disjoint_ranges_of_documents_that_leave_none_out(split: str, count: int) -> None:
    sizes = np.random.RandomState(0).randint(1, 100, count)
    ranges = split_documents(sizes, split)
    assert sum((list(ranges[name]) for name in ("train", "valid", "test")), []) == list(range(count))
    weights = [float(weight) for weight in split.split(",")]
    for name, weight in zip(("train", "valid", "test"), weights, strict=False):
        assert (len(ranges[name]) > 0) == (weight > 0) or count < 3
        if count == 50:
            assert abs(sizes[list(ranges[name])].sum() / sizes.sum() - weight / sum(weights)) < 0.05


def test_a_split_border_is_the_document_border_nearest_to_the_wanted_share() -> None:
    assert split_documents(np.full(100, 10), "90,9,1") == {"train": range(90), "valid": range(90, 99), "test": range(99, 100)}
    assert split_documents(np.array([50, 30, 20]), "58,42,0")["train"] == range(1)  # 50 is nearer to 58 than 80
    assert split_documents(np.array([50, 30, 20]), "72,28,0")["train"] == range(2)
    assert split_documents(np.array([7]), "98,2,0") == {"train": range(1), "valid": range(1, 1), "test": range(1, 1)}


def test_validation_holds_no_document_of_training_and_is_the_same_for_every_seed(make_pair, indexed_config) -> None:
    config = indexed_config([make_pair("a", [4] * 60, eod=None)], split="50,50,0", seq_len=4)  # 240 different tokens
    train, valid = build_data(config, "train"), build_data(config, "valid")
    assert train.num_sequences == valid.num_sequences == 29
    of_train = {token for row in rows_of(train, 0, 2 * 29) for token in row}
    of_valid = {token for row in rows_of(valid, 0, 29) for token in row}
    assert len(of_train) >= 116
    assert len(of_valid) == 116
    assert not of_train & of_valid
    config.seed += 1
    assert equal(build_data(config, "valid").batch(0, 29), valid.batch(0, 29))
    with pytest.raises(ConfigError, match="has 29"):
        valid.batch(25, 5)


def test_bytes_per_token_counts_end_tokens_and_is_measured_on_the_split(tmp_path, tokenizer, texts, indexed_config) -> None:
    prefix = str(tmp_path / "texts")
    with TokenWriter(prefix, tokenizer, "<|endoftext|>", {}) as writer:
        for text in texts:
            writer.add(tokenizer.encode(text).ids, len(text.encode()))
    config = indexed_config([prefix], split="60,40,0")
    stream = build_data(config, "valid")
    documents = stream.sources[0].documents
    num_bytes = sum(len(texts[i].encode()) for i in documents)
    num_tokens = sum(len(tokenizer.encode(texts[i]).ids) + 1 for i in documents)
    assert stream.bytes_per_token == pytest.approx(num_bytes / num_tokens, rel=1e-12)
    part(prefix, ".bytes.npy").unlink()  # as in a pair made by another program: decoded instead
    assert build_data(config, "valid").bytes_per_token == pytest.approx(num_bytes / num_tokens, rel=1e-12)


def test_a_large_epoch_is_cached_once_and_read_back_equal(make_pair, indexed_config, tmp_path, monkeypatch) -> None:
    config = indexed_config([make_pair("a", LENGTHS)])
    expected = build_data(config, "train").batch(0, 40)
    monkeypatch.setattr(epoch, "CACHED_ABOVE", 0)
    assert equal(build_data(config, "train").batch(0, 40), expected)
    folders = sorted((tmp_path / "cache" / "epochs").glob("[!.]*"))
    assert len(folders) == 3  # 40 rows of 15 an epoch
    times = [(folder / "row_order.npy").stat().st_mtime_ns for folder in folders]
    monkeypatch.setattr(epoch, "build_epoch", lambda *_: pytest.fail("built again"))
    assert equal(build_data(config, "train").batch(0, 40), expected)
    assert [(folder / "row_order.npy").stat().st_mtime_ns for folder in folders] == times
