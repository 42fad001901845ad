"""The router against plain formulas: what is chosen, with which weights, and what is dropped.

Shapes: N tokens, E experts, K choices a token, D hidden.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_train.config import BalanceConfig, ModelConfig, MoEConfig, RouterConfig
from moe_train.model.attention import AttentionMask
from moe_train.model.batch import ForwardContext, Recorder
from moe_train.model.moe.router import Router, expert_capacity, limit_to_groups, within_capacity

D, E, K = 16, 8, 3


def router(balance: BalanceConfig | None = None, moe: dict | None = None, **options: object) -> Router:
    config = ModelConfig(
        hidden_size=D, moe=MoEConfig(num_experts=E, top_k=K, expert_hidden_size=8, router=RouterConfig(**options), **(moe or {}))
    )
    module = Router(config, balance or BalanceConfig(), layer=0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return module


def context(shape: tuple[int, int], valid: torch.Tensor | None = None, recorder: Recorder | None = None) -> ForwardContext:
    zeros = torch.zeros(shape, dtype=torch.int64)
    return ForwardContext(positions_BT=zeros, mask=AttentionMask(zeros), valid_BT=valid, recorder=recorder)


def hidden(batch: int = 2, length: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed))


def plain_scores(logits: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "softmax":
        exp = (logits - logits.max(-1, keepdim=True).values).exp()
        return exp / exp.sum(-1, keepdim=True)
    if kind == "sigmoid":
        return 1 / (1 + (-logits).exp())
    return (1 + logits.exp()).log().sqrt()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_choice_and_weights(kind: str, normalize: bool) -> None:
    module = router(score=kind, normalize_topk=normalize, scaling_factor=2.5)
    x = hidden()
    routing = module(x, context((2, 5)))
    scores = plain_scores(x.flatten(0, 1).double() @ module.weight.double().T, kind)
    for n in range(10):
        best = sorted(range(E), key=lambda e: -scores[n, e])[:K]
        assert set(routing.expert_ids_NK[n].tolist()) == set(best)
        chosen = scores[n, routing.expert_ids_NK[n]]
        expected = 2.5 * (chosen / chosen.sum() if normalize else chosen)
        torch.testing.assert_close(routing.weights_NK[n].double(), expected, rtol=1e-5, atol=1e-7)


def test_softmax_after_topk_is_the_softmax_of_the_chosen_logits() -> None:
    module = router(softmax_order="after_topk", linear_bias=True)
    x = hidden()
    routing = module(x, context((2, 5)))
    logits = x.flatten(0, 1) @ module.weight.T + module.linear_bias
    top = logits.topk(K, dim=-1)
    assert torch.equal(routing.expert_ids_NK, top.indices)
    torch.testing.assert_close(routing.weights_NK, top.values.softmax(-1))


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_the_bias_acts_on_the_choice_only(score: str) -> None:
    module = router(score=score)
    x = hidden()
    module.selection_bias[5] = 10.0
    routing = module(x, context((2, 5)))
    assert (routing.expert_ids_NK == 5).any(dim=-1).all()
    scores = plain_scores(x.flatten(0, 1) @ module.weight.T, score).gather(-1, routing.expert_ids_NK)
    torch.testing.assert_close(routing.weights_NK, scores / scores.sum(-1, keepdim=True))


def test_bias_is_never_trained_and_router_gets_a_gradient() -> None:
    module = router(score="sigmoid")
    module(hidden(), context((2, 5))).weights_NK[:, 0].sum().backward()
    assert not module.selection_bias.requires_grad
    assert module.weight.grad is not None
    assert module.weight.grad.abs().sum() > 0
    assert "selection_bias" in module.state_dict()


def test_groups_outside_the_best_never_win_although_scores_are_negative() -> None:
    config = RouterConfig(num_groups=4, topk_groups=2)
    biased = torch.tensor([[-5.0, -6.0, -1.0, -9.0, -2.0, -2.5, -0.5, -30.0]])
    limited = limit_to_groups(biased, config)
    # Sums of two: -11, -10, -4.5, -30.5: groups 2 and 1 stay.
    assert (limited[0, [0, 1, 6, 7]] == -math.inf).all()
    assert torch.equal(limited[0, [2, 3, 4, 5]], biased[0, [2, 3, 4, 5]])
    best = limit_to_groups(biased, RouterConfig(num_groups=4, topk_groups=2, group_score="max"))
    # Maxima: -5, -1, -2, -0.5: groups 3 and 1 stay.
    assert torch.isinf(best[0]).tolist() == [True, True, False, False, True, True, False, False]


@given(st.integers(0, 10_000), st.sampled_from([2, 4]), st.integers(1, 2), st.sampled_from(["top2_sum", "max"]))
def test_group_limited_choice_lies_in_the_best_groups(seed: int, groups: int, kept: int, kind: str) -> None:
    biased = torch.randn(6, E, generator=torch.Generator().manual_seed(seed)) - 3
    limited = limit_to_groups(biased, RouterConfig(num_groups=groups, topk_groups=kept, group_score=kind))
    size = E // groups
    for n in range(6):
        values = []
        for g in range(groups):
            ordered = sorted(biased[n, g * size : (g + 1) * size].tolist(), reverse=True)
            values.append(sum(ordered[:2]) if kind == "top2_sum" else ordered[0])
        best = sorted(range(groups), key=lambda g: -values[g])[:kept]
        open_ = {e for e in range(E) if e // size in best}
        assert {e for e in range(E) if limited[n, e] > -math.inf} == open_


def test_jitter_only_in_training() -> None:
    module = router(jitter=0.5)
    x = hidden()
    module.eval()
    assert torch.equal(module(x, context((2, 5))).weights_NK, module(x, context((2, 5))).weights_NK)
    module.train()
    assert not torch.equal(module(x, context((2, 5))).weights_NK, module(x, context((2, 5))).weights_NK)


def test_forced_balance_deals_out_evenly_without_repeating_an_expert() -> None:
    routing = router(force_balanced=True)(hidden(4, 16), context((4, 16)))
    assert torch.bincount(routing.expert_ids_NK.flatten(), minlength=E).tolist() == [64 * K // E] * E
    assert all(len(set(row)) == K for row in routing.expert_ids_NK.tolist())


def test_padding_is_kept_from_experts_and_not_counted() -> None:
    module, recorder = router(), Recorder()
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 2:] = False
    routing = module(hidden(), context((2, 5), valid, recorder))
    assert torch.equal(routing.keep_NK, valid.flatten()[:, None].expand(-1, K))
    expected = torch.bincount(routing.expert_ids_NK[valid.flatten()].flatten(), minlength=E)
    assert torch.equal(recorder.load[0], expected)
    assert recorder.load[0].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_router_stays_fp32_bit_by_bit(dtype: torch.dtype) -> None:
    module = router(linear_bias=True)
    module.selection_bias.normal_()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    after = torch.nn.Sequential(module).to(dtype)[0].state_dict()
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == torch.float32 for name in before)


def plain_capacity(ids: list[list[int]], weights: list[list[float]], keep: list[list[bool]], capacity: int, by_score: bool) -> list:
    places = [(n, k) for n in range(len(ids)) for k in range(K) if keep[n][k]]
    if by_score:
        places.sort(key=lambda place: -weights[place[0]][place[1]])
    taken, kept = [0] * E, [[False] * K for _ in ids]
    for n, k in places:
        if taken[ids[n][k]] < capacity:
            taken[ids[n][k]] += 1
            kept[n][k] = True
    return kept


@given(st.integers(0, 10_000), st.integers(0, 6), st.booleans(), st.booleans())
def test_capacity_keeps_the_first(seed: int, capacity: int, by_score: bool, padded: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(9, E, generator=generator).topk(K, dim=-1).indices
    weights = torch.rand(9, K, generator=generator)
    keep = torch.rand(9, 1, generator=generator).lt(0.7).expand(9, K) if padded else None
    found = within_capacity(ids, weights, keep, capacity, by_score)
    plain_keep = [[True] * K] * 9 if keep is None else keep.tolist()
    assert found.tolist() == plain_capacity(ids.tolist(), weights.tolist(), plain_keep, capacity, by_score)


@pytest.mark.parametrize("policy", ["score", "position"])
def test_capacity_factor_drops_and_counts(policy: str) -> None:
    module, recorder = router(moe={"capacity_factor": 0.5, "drop_policy": policy}), Recorder()
    routing = module(hidden(4, 16), context((4, 16), recorder=recorder))
    capacity = expert_capacity(64, K, E, 0.5)
    assert capacity == 12
    kept = torch.bincount(routing.expert_ids_NK[routing.keep_NK], minlength=E)
    assert kept.max() <= capacity
    assert int(recorder.dropped[0]) == 64 * K - int(kept.sum()) > 0
    assert int(recorder.load[0].sum()) == 64 * K
