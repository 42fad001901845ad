"""Balancing against plain formulas, and the laws: injected gradients, one denominator, integer counts, padding that never counts.

Shapes: B rows, T tokens, N = B·T, E experts, K choices a token, D hidden.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_train.config import AttentionConfig, BalanceConfig, ModelConfig, MoEConfig, RouterConfig
from moe_train.model.balancing import load_metrics, update_biases
from moe_train.model.balancing.inject import inject
from moe_train.model.balancing.load_balance import global_batch_loss, micro_batch_loss, sequence_loss
from moe_train.model.balancing.quantile import histogram, quantile_update
from moe_train.model.balancing.sign_bias import sign_update
from moe_train.model.balancing.sinkhorn import sinkhorn
from moe_train.model.balancing.z_loss import z_loss
from moe_train.model.batch import PADDING, Batch, Denominators, Recorder
from moe_train.model.transformer import Transformer

E, K = 6, 2


def random_routing(seed: int, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(tokens, E, generator=generator, dtype=torch.float64).softmax(-1)
    return probs, torch.rand(tokens, E, generator=generator).topk(K, dim=-1).indices


def plain_load_balance(probs: list[list[float]], ids: list[list[int]], counted: list[list[int]]) -> float:
    """E Σ_i (share of choices of i in `counted`) · (mean probability of i), by loops."""
    total = 0.0
    for i in range(E):
        share = sum(row.count(i) for row in counted) / (len(counted) * K)
        total += E * share * sum(row[i] for row in probs) / len(probs)
    return total


@given(st.integers(0, 10_000))
def test_load_balancing_losses_equal_the_loops(seed: int) -> None:
    probs, ids = random_routing(seed)
    load = torch.bincount(ids.flatten(), minlength=E)
    expected = plain_load_balance(probs.tolist(), ids.tolist(), ids.tolist())
    assert float(micro_batch_loss(probs, load, None)) == pytest.approx(expected)
    rows = [plain_load_balance(probs[i : i + 4].tolist(), ids[i : i + 4].tolist(), ids[i : i + 4].tolist()) for i in (0, 4, 8)]
    assert float(sequence_loss(probs.view(3, 4, E), ids.view(3, 4, K), None)) == pytest.approx(sum(rows) / 3)
    others = random_routing(seed + 1)[1]
    both = load + torch.bincount(others.flatten(), minlength=E)
    expected = plain_load_balance(probs.tolist(), ids.tolist(), ids.tolist() + others.tolist())
    assert float(global_batch_loss(probs, both, None)) == pytest.approx(expected)


def test_balanced_routing_gives_exactly_one() -> None:
    probs = torch.full((E, E), 1 / E, dtype=torch.float64)
    ids = torch.arange(E * K).view(E, K) % E
    load = torch.bincount(ids.flatten(), minlength=E)
    assert float(micro_batch_loss(probs, load, None)) == pytest.approx(1.0, abs=1e-15)
    assert float(sequence_loss(probs.view(1, E, E), ids.view(1, E, K), None)) == pytest.approx(1.0, abs=1e-15)


@given(st.integers(0, 10_000), st.integers(1, 11))
def test_padding_changes_no_loss_and_no_histogram(seed: int, length: int) -> None:
    probs, ids = random_routing(seed)
    logits, bias = probs.log(), torch.randn(E, generator=torch.Generator().manual_seed(seed)).double()
    valid = torch.arange(12) < length
    short_load = torch.bincount(ids[:length].flatten(), minlength=E)
    cases = [
        (micro_batch_loss(probs, short_load, valid), micro_batch_loss(probs[:length], short_load, None)),
        (sequence_loss(probs[None], ids[None], valid[None]), sequence_loss(probs[None, :length], ids[None, :length], None)),
        (z_loss(logits, valid), z_loss(logits[:length], None)),
    ]
    for padded, plain in cases:
        assert float(padded) == pytest.approx(float(plain))
    assert torch.equal(histogram(probs, bias, K, 50, valid), histogram(probs[:length], bias, K, 50, None))


def test_rows_count_by_their_tokens() -> None:
    probs, ids = random_routing(3)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, 2:] = False
    losses = [float(sequence_loss(probs[None, i : i + n], ids[None, i : i + n], None)) for i, n in ((0, 6), (6, 2))]
    found = float(sequence_loss(probs.view(2, 6, E), ids.view(2, 6, K), valid))
    assert found == pytest.approx((6 * losses[0] + 2 * losses[1]) / 8)


def test_z_loss_formula() -> None:
    logits = torch.randn(7, E, dtype=torch.float64)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 7
    assert float(z_loss(logits, None)) == pytest.approx(expected)


def test_inject_adds_the_gradient_and_nothing_else() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    carrier = weight * 5
    carried = inject(carrier, 7 * weight.square().sum())
    assert torch.equal(carried, carrier)
    carried.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5 + 7 * 4, 5 + 7 * 6]


# The whole model.


def model(balance: BalanceConfig, score: str = "sigmoid", **options: object) -> Transformer:
    config = ModelConfig(
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        attention=AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=2, head_dim=16),
        moe=MoEConfig(num_experts=E, top_k=K, expert_hidden_size=16, router=RouterConfig(score=score, **options)),
    )
    net = Transformer(config, balance)
    net.init_weights(0)
    with torch.no_grad():
        for block in net.blocks:
            block.ffn.router.weight.mul_(30)
    return net.train()


def batch(rows: int = 4, length: int = 8, padded: bool = False) -> Batch:
    tokens = torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(5))
    documents = torch.zeros_like(tokens)
    if padded:
        documents[1, 3:] = PADDING
        documents[3, 6:] = PADDING
    return Batch.from_tokens(tokens, documents)


def router_gradients(net: Transformer, whole: Batch, micro: int, exact: bool = True) -> tuple[list[torch.Tensor], Recorder]:
    counts, recorder, global_load = Denominators.of(whole), Recorder(), None
    if exact and net.balance.global_aux_coef:
        first = Recorder()
        with torch.no_grad():
            for part in whole.split(micro):
                net(part, counts, first)
        global_load = first.load
    net.zero_grad()
    for part in whole.split(micro):
        net(part, counts, recorder, global_load).loss.backward()
    return [block.ffn.router.weight.grad.clone() for block in net.blocks], recorder


LOSSES = {"seq_aux_loss": "seq_aux_coef", "global_aux_loss": "global_aux_coef", "z_loss": "z_coef", "aux_loss": "aux_coef"}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("padded", [False, True])
def test_each_loss_reaches_the_router_and_is_recorded_apart(name: str, padded: bool) -> None:
    whole = batch(padded=padded)
    plain, _ = router_gradients(model(BalanceConfig()), whole, 4)
    net = model(BalanceConfig(**{LOSSES[name]: 0.5}))
    found, recorder = router_gradients(net, whole, 4)
    assert all(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(plain, found, strict=True))
    assert list(recorder.losses) == [name]
    without = model(BalanceConfig())(whole, Denominators.of(whole)).loss
    assert torch.equal(net(whole, Denominators.of(whole)).loss, without), "the balancing loss must not be added to the loss"


@pytest.mark.parametrize("name", ["seq_aux_loss", "global_aux_loss", "z_loss"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_accumulation_changes_nothing(name: str, padded: bool, score: str) -> None:
    whole, net = batch(padded=padded), model(BalanceConfig(**{LOSSES[name]: 0.7}), score)
    expected, once = router_gradients(net, whole, 4)
    for micro in (1, 2, 3):
        found, recorder = router_gradients(net, whole, micro)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7)
        for layer in (0, 1):
            assert float(recorder.losses[name][layer]) == pytest.approx(float(once.losses[name][layer]), rel=1e-5)
            assert torch.equal(recorder.load[layer], once.load[layer])


def test_the_gradient_is_that_of_the_added_loss() -> None:
    """Against autograd of loss + coefficient · aux, written out, for a single layer's router."""
    whole = batch()
    found, _ = router_gradients(model(BalanceConfig(aux_coef=0.3), "softmax"), whole, 4)
    net = model(BalanceConfig(), "softmax")
    kept: list[torch.Tensor] = []
    handle = net.blocks[1].ffn.router.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    loss = net(whole, Denominators.of(whole)).loss
    handle.remove()
    probs = (kept[0].flatten(0, 1) @ net.blocks[1].ffn.router.weight.T).softmax(-1)
    load = torch.bincount(probs.topk(K, dim=-1).indices.flatten(), minlength=E)
    (loss + 0.3 * E * (load / load.sum() * probs.mean(0)).sum()).backward()
    torch.testing.assert_close(found[1], net.blocks[1].ffn.router.weight.grad, rtol=1e-5, atol=1e-7)


def test_the_sequence_loss_counts_the_best_scores_whatever_the_bias_chooses() -> None:
    """DeepSeek-V3 eq. 18 has s, not s + b. The other losses count what was chosen."""
    whole, values = batch(), {}
    for bias in (0.0, 50.0):
        net = model(BalanceConfig(seq_aux_coef=0.5, aux_coef=0.5))
        recorder = Recorder()
        net.blocks[1].ffn.router.selection_bias[2] = bias
        net(whole, Denominators.of(whole), recorder)
        assert bool(recorder.load[1][2] == recorder.load[1].sum() / K) == (bias > 0)
        values[bias] = {name: float(losses[1]) for name, losses in recorder.losses.items()}
    assert values[0.0]["seq_aux_loss"] == values[50.0]["seq_aux_loss"]
    assert values[0.0]["aux_loss"] != values[50.0]["aux_loss"]


def test_buffered_global_counts_see_the_micro_batches_so_far() -> None:
    whole = batch()
    exact, _ = router_gradients(model(BalanceConfig(global_aux_coef=0.7)), whole, 1)
    buffered, _ = router_gradients(model(BalanceConfig(global_aux_coef=0.7, global_counts="buffer")), whole, 1, exact=False)
    assert not torch.allclose(exact[0], buffered[0], rtol=1e-4)
    one, _ = router_gradients(model(BalanceConfig(global_aux_coef=0.7, global_counts="buffer")), whole, 4, exact=False)
    four, _ = router_gradients(model(BalanceConfig(global_aux_coef=0.7)), whole, 4)
    torch.testing.assert_close(one[0], four[0])


def test_evaluation_injects_counts_and_moves_nothing() -> None:
    net = model(BalanceConfig(aux_coef=1.0, bias="quantile"))
    net.eval()
    recorder = Recorder()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net(batch(), recorder=recorder).loss.backward()
    assert recorder.losses == {}
    assert recorder.required_bias == {}
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in state.items())


# The bias rules.


def test_counts_stay_exact_where_floats_round() -> None:
    load = torch.tensor([2**24 + 1, 2**24, 2**24 - 1, 2**24], dtype=torch.int64)
    assert sign_update(torch.zeros(4), load, 0.5).tolist() == [-0.5, 0.0, 0.5, 0.0]


def test_update_runs_on_layers_that_saw_tokens_only() -> None:
    net, recorder = model(BalanceConfig(bias="sign", bias_rate=0.1)), Recorder()
    recorder.load = {0: torch.zeros(E, dtype=torch.int64), 1: torch.tensor([9, 1, 2, 2, 2, 2])}
    update_biases(net, recorder, net.balance)
    assert net.blocks[0].ffn.router.selection_bias.abs().sum() == 0
    torch.testing.assert_close(net.blocks[1].ffn.router.selection_bias, torch.tensor([-0.1, 0.1, 0.1, 0.1, 0.1, 0.1]))
    update_biases(net, recorder, BalanceConfig())
    assert float(net.blocks[1].ffn.router.selection_bias[0]) == pytest.approx(-0.1)


@given(st.integers(0, 10_000), st.sampled_from([100, 1000]))
def test_quantile_is_exact_to_a_bin(seed: int, bins: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(400, E, generator=generator).double()
    bias = (torch.rand(E, generator=generator) - 0.5).double()
    cutoff = (scores + bias).topk(K + 1, dim=-1).values[:, -1:]
    exact = torch.stack([(cutoff - scores)[:, e].quantile(K / E) for e in range(E)])
    found = quantile_update(bias, histogram(scores, bias, K, bins, None), K)
    width = float(bias.max() - bias.min() + 2) / bins
    gap = torch.diff((cutoff - scores).sort(0).values, dim=0).max()
    assert float(((exact - exact.mean()) - found).abs().max()) <= 2 * (width + float(gap))
    assert float(found.sum()) == pytest.approx(0, abs=1e-6)


def test_histograms_add_up_over_micro_batches() -> None:
    scores, bias = torch.rand(30, E), torch.rand(E)
    parts = histogram(scores[:11], bias, K, 100, None) + histogram(scores[11:], bias, K, 100, None)
    assert torch.equal(parts, histogram(scores, bias, K, 100, None))
    assert parts.sum(-1).tolist() == [30] * E


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_bias_rules_balance_a_skewed_router(rule: str) -> None:
    """Stationary scores with a strong preference: MaxVio falls from far above 1 to below 0.04."""
    generator = torch.Generator().manual_seed(0)
    preference = torch.linspace(-1.5, 1.5, E)
    bias = torch.zeros(E)
    for step in range(400 if rule == "sign" else 30):
        scores = (torch.randn(20_000, E, generator=generator) + preference).sigmoid()
        load = torch.bincount((scores + bias).topk(K, dim=-1).indices.flatten(), minlength=E)
        max_vio = load_metrics({0: load})["max_vio"]
        if step == 0:
            assert max_vio > 1
        if rule == "sign":
            bias = sign_update(bias, load, 0.01 * (1 - step / 400))
        else:
            bias = quantile_update(bias, histogram(scores, bias, K, 1000, None), K)
    assert max_vio < 0.04


def test_sinkhorn_rows_and_columns() -> None:
    plan = sinkhorn(torch.randn(24, E), 200)
    torch.testing.assert_close(plan.sum(0), torch.full((E,), 1 / E), rtol=1e-4, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((24,), 1 / 24), rtol=1e-3, atol=0)
    valid = torch.arange(24) < 18
    padded = sinkhorn(torch.randn(24, E), 200, valid)
    assert padded[18:].abs().sum() == 0
    torch.testing.assert_close(padded.sum(0), torch.full((E,), 1 / E), rtol=1e-4, atol=0)


def test_sinkhorn_balances_the_choice_in_training_only() -> None:
    whole = batch(8, 16)

    def max_vio(iterations: int, training: bool) -> float:
        recorder = Recorder()
        model(BalanceConfig(sinkhorn_iterations=iterations), "softmax").train(training)(whole, recorder=recorder)
        return float(load_metrics(recorder.load)["max_vio"])

    assert max_vio(30, True) < max_vio(0, True)
    assert max_vio(30, False) == max_vio(0, False)


def test_load_metrics_by_hand() -> None:
    found = load_metrics({2: torch.tensor([4, 0, 2, 2]), 5: torch.tensor([2, 2, 2, 2])})
    assert found["max_vio_per_layer"] == [1.0, 0.0]
    assert found["max_vio"] == 1.0
    assert (found["load_min"], found["load_mean"], found["load_max"], found["dead_experts"]) == (0.0, 2.0, 2.0, 1.0)
    half = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25)) / math.log(4)
    assert found["load_entropy"] == pytest.approx((half + 1) / 2)
    assert load_metrics({}) == {}
