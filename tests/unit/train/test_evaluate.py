"""Evaluation: sum of token losses over labelled tokens, whatever the micro-batch; nothing counted, drawn or left changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from moe_train.config import AttentionConfig, BalanceConfig, ModelConfig, MoEConfig, RouterConfig
from moe_train.model.batch import IGNORE, Batch
from moe_train.model.transformer import Transformer
from moe_train.train.evaluate import Evaluation, evaluate


@pytest.fixture(scope="module")
def model() -> Transformer:
    attention = AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=1, head_dim=8)
    config = ModelConfig(
        vocab_size=40, hidden_size=16, num_layers=2, attention=attention, moe=MoEConfig(4, 2, 8, router=RouterConfig(jitter=0.5))
    )
    model = Transformer(config, BalanceConfig(aux_coef=1.0, bias="sign"))
    model.init_weights(0)
    return model


@pytest.fixture(scope="module")
def rows() -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens_BT = torch.randint(0, 40, (7, 12), generator=generator)
    documents_BT = (torch.arange(12)[None] >= torch.arange(7)[:, None] + 2).long()
    batch = Batch.from_tokens(tokens_BT, documents_BT)
    batch.labels_BT[1, :9] = IGNORE
    batch.labels_BT[4] = IGNORE
    return batch


def slice_of(batch: Batch, start: int, count: int) -> Batch:
    part = slice(start, start + count)
    return Batch(batch.tokens_BT[part], batch.labels_BT[part], batch.document_ids_BT[part])


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7, 50])
def test_equals_the_plain_mean_over_all_labels(model: Transformer, rows: Batch, micro_batch: int) -> None:
    model.train()
    random_state, weights = torch.get_rng_state(), {name: t.clone() for name, t in model.state_dict().items()}
    result = evaluate(model, lambda start, count: slice_of(rows, start, count), 7, micro_batch, 3.5, torch.device("cpu"))
    assert result is not None
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        logits = model.eval().logits(rows.tokens_BT, rows.document_ids_BT)
    expected = F.cross_entropy(logits.double().flatten(0, 1), rows.labels_BT.flatten(), ignore_index=IGNORE)
    assert result.tokens == int((rows.labels_BT != IGNORE).sum())
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2) / 3.5)


def test_stops_when_asked(model: Transformer, rows: Batch) -> None:
    assert evaluate(model, lambda start, count: slice_of(rows, start, count), 7, 2, 1.0, torch.device("cpu"), lambda: True) is None


def test_perplexity_never_overflows() -> None:
    assert Evaluation(math.log(8), 1, 1.0).perplexity == pytest.approx(8)
    assert Evaluation(5000.0, 1, 1.0).perplexity == math.inf
