"""Generation: the cache changes nothing, and each knob of the sampler does what it says."""

from __future__ import annotations

import pytest
import torch

from moe_train.config import AttentionConfig, ModelConfig, MoEConfig, RouterConfig
from moe_train.model.sampling import Sampling, choose, generate
from moe_train.model.transformer import Transformer

MLA = AttentionConfig(kind="mla", num_heads=2, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
GQA = AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8)
WINDOW = AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=4, sliding_window_every=2, sinks=True)


def model(attention: AttentionConfig) -> Transformer:
    config = ModelConfig(
        vocab_size=50,
        hidden_size=32,
        num_layers=2,
        attention=attention,
        moe=MoEConfig(num_experts=4, top_k=2, expert_hidden_size=16, router=RouterConfig(score="sigmoid")),
    )
    net = Transformer(config)
    net.init_weights(3)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # far from uniform, so that greedy choices are clear
    return net.eval()


@pytest.mark.parametrize("attention", [MLA, GQA, WINDOW], ids=["mla", "gqa", "window and sinks"])
def test_greedy_equals_the_model_without_a_cache(attention: AttentionConfig) -> None:
    net = model(attention)
    prompt = [1, 7, 3, 9, 4, 11]
    tokens = list(generate(net, prompt, 12, Sampling(temperature=0)))
    text = list(prompt)
    with torch.no_grad():
        for token in tokens:
            assert token == int(net.logits(torch.tensor([text]))[0, -1].argmax())
            text.append(token)
    assert len(tokens) == 12


def test_the_seed_decides() -> None:
    net = model(MLA)

    def draw(seed: int) -> list[int]:
        return list(generate(net, [1, 2, 3], 20, Sampling(temperature=5.0, seed=seed)))

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_ends_before_the_stop_token() -> None:
    net = model(GQA)
    tokens = list(generate(net, [5, 6], 10, Sampling(temperature=0)))
    stopped = list(generate(net, [5, 6], 10, Sampling(temperature=0), stop_id=tokens[-1]))
    assert stopped == tokens[: tokens.index(tokens[-1])]


LOGITS = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()


def drawn(sampling: Sampling) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {choose(LOGITS, sampling, generator) for _ in range(400)}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(temperature=0), {1}),
        (Sampling(top_k=2), {1, 2}),
        (Sampling(top_p=0.39), {1}),
        (Sampling(top_p=0.41), {1, 2}),
        (Sampling(top_p=0.75), {1, 2, 3}),
        (Sampling(temperature=0.01), {1}),
    ],
)
def test_sampler(sampling: Sampling, expected: set[int]) -> None:
    assert drawn(sampling) == expected


def test_temperature_is_the_softmax_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([choose(LOGITS, Sampling(temperature=2.0), generator) for _ in range(4000)]), minlength=4)
    assert torch.allclose(counts / 4000, (LOGITS / 2).softmax(-1), atol=0.03)
