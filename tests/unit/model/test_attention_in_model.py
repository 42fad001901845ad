"""Attention inside the whole model: packed documents, padding, the largest logits for QK-clip, and misuse."""

from __future__ import annotations

import pytest
import torch

from moe_train.config import AttentionConfig, ConfigError, ModelConfig, MoEConfig, MTPConfig, RopeConfig
from moe_train.config.compose import compose
from moe_train.model.attention import LayerCache
from moe_train.model.batch import PADDING, Batch, Denominators, Recorder
from moe_train.model.transformer import Transformer

MLA = AttentionConfig(
    kind="mla",
    num_heads=4,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    rope=RopeConfig(interleaved=True),
)
GQA = AttentionConfig(
    kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8, sinks=True, sliding_window=5, sliding_window_every=2, qkv_bias=True
)
ATTENTIONS = {"mla": MLA, "gqa": GQA}


def build(kind: str, recompute: tuple[str, ...] = (), depth: int = 1) -> Transformer:
    config = ModelConfig(
        vocab_size=40, hidden_size=24, num_layers=3, attention=ATTENTIONS[kind], moe=MoEConfig(4, 2, 12), mtp=MTPConfig(depth)
    )
    model = Transformer(config, recompute_parts=recompute)
    model.init_weights(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def gradients(model: Transformer, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the batches together, by one denominator."""
    whole = [Denominators.of(batch, model.config.mtp.depth) for batch in batches]
    mtp = [sum(d.mtp[k] for d in whole) for k in range(model.config.mtp.depth)]
    counts = Denominators(sum(d.tokens for d in whole), sum(d.labels for d in whole), mtp)
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        output = model(batch, counts)
        output.loss.backward()
        loss += output.loss.item()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_packed_rows_train_as_separate_rows(kind) -> None:
    model, lengths = build(kind), [4, 11, 2, 8]
    tokens = torch.randint(0, 40, (1, 25))
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    packed_loss, packed = gradients(model, [Batch.from_tokens(tokens, ids)])
    alone_loss, alone = gradients(model, [Batch.from_tokens(part) for part in tokens.split(lengths, dim=1)])
    assert packed_loss == pytest.approx(alone_loss, rel=1e-6)
    assert packed.keys() == alone.keys()
    for name, grad in packed.items():
        torch.testing.assert_close(grad, alone[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_padding_changes_nothing(kind) -> None:
    model = build(kind)
    tokens = torch.randint(0, 40, (2, 12))
    padded = torch.cat([tokens, torch.randint(0, 40, (2, 5))], dim=1)
    ids = torch.tensor([[0] * 12 + [PADDING] * 5] * 2)
    loss, grads = gradients(model, [Batch.from_tokens(padded, ids)])
    wanted, wanted_grads = gradients(model, [Batch.from_tokens(tokens)])
    assert loss == pytest.approx(wanted, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-4, atol=1e-6, msg=name)
    nothing = gradients(model, [Batch.from_tokens(tokens, torch.full((2, 12), PADDING))])
    assert nothing[0] == 0
    assert all(grad.isfinite().all() and not grad.any() for grad in nothing[1].values())


def largest_logits_by_hand(model: Transformer, tokens: torch.Tensor, ids: torch.Tensor, monkeypatch) -> list[torch.Tensor]:
    """Each layer's [H], from the queries and keys that reach attention, pair by pair."""
    from moe_train.model.attention import gqa, mla

    found = []

    def spy(q, k, v, visible, scale, sinks=None):
        k_all = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        best = torch.full((q.shape[1],), float("-inf"))
        for b in range(q.shape[0]):
            for t in range(q.shape[2]):
                for s in range(t + 1):
                    near = visible.window is None or t - s < visible.window
                    if ids[b, t] == ids[b, s] != PADDING and near:
                        best = torch.maximum(best, scale * (q[b, :, t] * k_all[b, :, s]).sum(-1).detach())
        found.append(best)
        return real(q, k, v, visible, scale, sinks)

    real = gqa.attend
    with monkeypatch.context() as patch:
        patch.setattr(gqa, "attend", spy)
        patch.setattr(mla, "attend", spy)
        model(Batch.from_tokens(tokens, ids))
    return found


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_largest_logits_are_recorded_per_head(kind, monkeypatch) -> None:
    model = build(kind)
    monkeypatch.setattr("moe_train.model.attention.qk_max.CHUNK", 5)
    tokens = torch.randint(0, 40, (2, 14))
    ids = torch.tensor([[0] * 6 + [1] * 8, [0] * 9 + [PADDING] * 5])
    recorder = Recorder(want_qk_max=True)
    model(Batch.from_tokens(tokens, ids), recorder=recorder)
    assert list(recorder.qk_max) == [0, 1, 2, 3], "the MTP block is layer 3"
    for layer, wanted in enumerate(largest_logits_by_hand(model, tokens, ids, monkeypatch)):
        torch.testing.assert_close(recorder.qk_max[layer], wanted, rtol=1e-5, atol=1e-5)


def test_largest_logits_are_the_maximum_over_micro_batches_and_not_recorded_in_a_replay() -> None:
    model = build("gqa", ("attention",), depth=0)
    first, second = (Batch.from_tokens(torch.randint(0, 40, (1, 9))) for _ in range(2))
    single = []
    for batch in (first, second):
        single.append(Recorder(want_qk_max=True))
        model(batch, recorder=single[-1])
    both, calls = Recorder(want_qk_max=True), []
    add = both.add_qk_max
    both.add_qk_max = lambda layer, value: (calls.append(layer), add(layer, value))  # type: ignore[method-assign]
    for batch in (first, second):
        model(batch, recorder=both).loss.backward()
    assert calls == [0, 1, 2] * 2, "once a layer and micro-batch, though backward runs attention again"
    for layer in range(3):
        torch.testing.assert_close(both.qk_max[layer], torch.maximum(single[0].qk_max[layer], single[1].qk_max[layer]))
    silent = Recorder()
    model(first, recorder=silent)
    assert not silent.qk_max


def test_a_cache_holds_one_document() -> None:
    model, tokens = build("mla"), torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="one document a row"):
        model.logits(tokens, document_ids_BT=tokens, cache=[LayerCache() for _ in model.blocks])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=qwen3_30b_a3b", "model.attention.num_kv_heads=5"], ["num_heads=32", "num_kv_heads=5", "1, 2, 4, 8, 16, 32"]),
        (["model=glm_4_5", "model.attention.rope.fraction=0.3"], ["head_dim=128", "0.3", "38.4"]),
        (["model=qwen3_30b_a3b", "model.attention.head_dim=7"], ["head_dim=7", "even"]),
        (["model=deepseek_v3", "model.attention.qk_rope_head_dim=63"], ["qk_rope_head_dim=63", "use 64"]),
        (["model=deepseek_v3", "model.attention.kv_lora_rank=0"], ["kv_lora_rank=0"]),
        (["model=deepseek_v3", "model.attention.rope.mscale_all_dim=null"], ["mscale=1.0", "mscale_all_dim=None", "both or neither"]),
        (["model=deepseek_v3", "model.attention.sinks=true"], ["without effect", "sinks=true", "kind=mla"]),
        (["model=deepseek_v3", "model.attention.sliding_window=128"], ["without effect", "sliding_window=128", "kind=mla"]),
        (["model=qwen3_30b_a3b", "model.attention.sliding_window=0"], ["sliding_window=0", "above 0"]),
        (["model=qwen3_30b_a3b", "model.attention.sliding_window_every=2"], ["without effect", "sliding_window=null"]),
        (["model=qwen3_30b_a3b", "model.attention.rope.factor=4"], ["without effect", "rope.factor=4.0", "scaling=none"]),
    ],
)
def test_combinations_that_cannot_work_are_refused(overrides, words) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*overrides, "data.seq_len=64"])
    assert all(word in str(error.value) for word in words), str(error.value)
