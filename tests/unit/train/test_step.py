"""Law: the same global batch gives the same loss, gradient norm and weights for every micro-batch size and recompute setting."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe_train.config import (
    AttentionConfig,
    BalanceConfig,
    Config,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    OptimConfig,
    RouterConfig,
    ScheduleConfig,
    TrainConfig,
)
from moe_train.model.batch import IGNORE, PADDING, Batch
from moe_train.model.transformer import Transformer
from moe_train.optim import Optimizer, build_optimizer
from moe_train.train.precision import Weights
from moe_train.train.step import StepResult, TrainStep

CPU = torch.device("cpu")


def make_config(**changes: object) -> Config:
    attention = AttentionConfig(
        kind="mla", num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    moe = MoEConfig(8, 2, 16, 1, router=RouterConfig(score="sigmoid", num_groups=4, topk_groups=2))
    model = ModelConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=3,
        ffn_hidden_size=48,
        first_dense_layers=1,
        attention=attention,
        moe=moe,
        mtp=MTPConfig(1),
    )
    balance = BalanceConfig(seq_aux_coef=0.01, global_aux_coef=0.02, z_coef=0.001, bias="sign", bias_rate=0.01)
    config = Config(model=model, balance=balance, optim=OptimConfig(lr=0.01, eps=1e-3, schedule=ScheduleConfig("constant")))
    config.train = TrainConfig(steps=10, global_batch=16, micro_batch=16, grad_clip=0.5)
    for key, value in changes.items():
        setattr(config.train if hasattr(config.train, key) else config, key, value)
    return config


def make_batch(seed: int, rows: int = 16, tokens: int = 24) -> Batch:
    """Packed rows of two documents with very different numbers of labels: masked prompts, padded tails, one row without any label."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(8, 61, (rows, tokens), generator=generator)
    documents_BT = torch.zeros_like(tokens_BT)
    for row in range(rows):
        documents_BT[row, 5 + row % 7 :] = 1
        documents_BT[row, tokens - row :] = PADDING
    batch = Batch.from_tokens(tokens_BT, documents_BT)
    batch.labels_BT[3] = IGNORE
    batch.labels_BT[5:8, :9] = IGNORE
    return batch


@dataclass
class Setup:
    model: Transformer
    weights: Weights
    optimizer: Optimizer
    step: TrainStep

    def tensors(self) -> dict[str, Tensor]:
        moments = {name: t.clone() for name, t in self.optimizer.state().items()}
        masters = {f"master/{name}": t.detach().clone() for name, t in self.weights.master.items()}
        return {name: t.clone() for name, t in self.model.state_dict().items()} | moments | masters


def build(config: Config) -> Setup:
    parts = {"none": (), "selective": tuple(config.train.recompute_parts), "full": ("block",)}[config.train.recompute]
    model = Transformer(config.model, config.balance, parts)
    model.init_weights(0)
    weights = Weights(model, config.train.precision)
    optimizer = build_optimizer(model, weights.master, config.optim, weights.dtype)
    return Setup(model, weights, optimizer, TrainStep(model, weights, optimizer, config, CPU))


def train(config: Config, steps: int = 3) -> tuple[list[StepResult], Setup]:
    setup = build(config)
    return [setup.step(make_batch(step), step) for step in range(steps)], setup


@pytest.fixture(scope="module")
def reference() -> tuple[list[StepResult], Setup]:
    return train(make_config())


def assert_same(results: list[StepResult], setup: Setup, reference: tuple[list[StepResult], Setup]) -> None:
    expected, other = reference
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.mtp_losses == pytest.approx(theirs.mtp_losses, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-6)
        assert ours.recorder.load.keys() == theirs.recorder.load.keys()
        for layer, load in ours.recorder.load.items():
            assert torch.equal(load, theirs.recorder.load[layer])
        for name, layers in theirs.recorder.losses.items():
            for layer, value in layers.items():
                torch.testing.assert_close(ours.recorder.losses[name][layer], value, rtol=1e-5, atol=1e-8)
    # The large eps of make_config keeps AdamW smooth: with 1e-8 a gradient that is all rounding moves its weight by a part of lr.
    for name, tensor in other.model.named_parameters():
        torch.testing.assert_close(setup.model.get_parameter(name), tensor, rtol=1e-5, atol=2e-7, msg=name)
    for name, buffer in other.model.named_buffers():
        assert torch.equal(setup.model.get_buffer(name), buffer), name


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 5, 16])
def test_micro_batch_size_changes_nothing(micro_batch: int, reference: tuple[list[StepResult], Setup]) -> None:
    assert_same(*train(make_config(micro_batch=micro_batch)), reference)


@pytest.mark.parametrize("parts", ["full", ("attention",), ("ffn",), ("experts", "norms")])
def test_recompute_changes_nothing(parts: str | tuple[str, ...], reference: tuple[list[StepResult], Setup]) -> None:
    setting = {"recompute": "full"} if parts == "full" else {"recompute": "selective", "recompute_parts": list(parts)}
    assert_same(*train(make_config(micro_batch=4, **setting)), reference)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_quantile_balancing_and_muon_are_invariant_too(optimizer: str) -> None:
    def config(micro_batch: int) -> Config:
        config = make_config(micro_batch=micro_batch, balance=BalanceConfig(bias="quantile"))
        config.optim.name = optimizer
        return config

    results, setup = train(config(16))
    assert setup.model.get_buffer("blocks.1.ffn.router.selection_bias").abs().max() > 0
    assert_same(*train(config(4)), (results, setup))


def test_gradients_are_invariant_before_any_optimizer() -> None:
    """They agree to fp32 rounding, and each parameter has one."""
    found = []
    for micro_batch in (16, 3):
        setup = build(make_config(micro_batch=micro_batch))
        setup.step(make_batch(0), 0)
        found.append({name: g.clone() for name, g in setup.weights.gradients().items()})
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).norm() <= 2e-6 * gradient.norm() + 1e-9, name
    assert found[0]["blocks.1.ffn.router.weight"].norm() > 0


def test_an_expert_without_tokens_has_zero_gradients_not_none() -> None:
    config = make_config()
    config.model.moe = MoEConfig(8, 1, 16)
    setup = build(config)
    for module in setup.model.modules():
        if hasattr(module, "selection_bias"):
            module.selection_bias[0] = -100.0
    setup.step(make_batch(0), 0)
    gradient = setup.weights.gradients()["blocks.1.ffn.experts.gate_up_proj"]
    assert gradient[0].abs().max() == 0
    assert gradient[1:].abs().max() > 0


def test_a_batch_without_labels_trains_nothing_but_is_finite() -> None:
    setup, batch = build(make_config()), make_batch(0)
    batch.labels_BT.fill_(IGNORE)
    result = setup.step(batch, 0)
    assert (result.loss, result.skipped) == (0.0, False)


def test_rows_that_are_fully_masked_weigh_zero() -> None:
    whole = make_batch(0)
    kept = [row for row in range(16) if (whole.labels_BT[row] != IGNORE).any()]
    assert len(kept) < 16
    config = make_config()
    config.balance = BalanceConfig()
    few = Batch(whole.tokens_BT[kept], whole.labels_BT[kept], whole.document_ids_BT[kept])
    results = [build(config).step(batch, 0) for batch in (whole, few)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(precision: str, optimizer: str, poison: float) -> None:
    config = make_config(micro_batch=4, precision=precision)
    config.optim.name = optimizer
    setup = build(config)
    setup.step(make_batch(0), 0)
    with torch.no_grad():
        setup.model.embedding.weight[1] = poison  # token 1 occurs in the second batch alone
    before, updates = setup.tensors(), setup.optimizer.updates
    bad = make_batch(1)
    bad.tokens_BT[2, 0] = 1
    result = setup.step(bad, 1)
    assert result.skipped
    assert not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
    assert setup.optimizer.updates == updates
    for name, tensor in setup.tensors().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0)), name
    assert not setup.step(make_batch(2), 2).skipped


def test_the_clip_limits_the_update_by_one_global_factor() -> None:
    """With momentum-free, decay-free AdamW the clip cannot be seen; the first moment shows it: exp_avg = (1 − β1) · clip/norm · g."""
    setup = build(make_config(grad_clip=0.1))
    result = setup.step(make_batch(0), 0)
    moments = [t for name, t in setup.optimizer.state().items() if name.startswith("exp_avg/")]
    norm = torch.cat([m.flatten() for m in moments]).double().norm() / 0.1
    assert result.grad_norm > 0.1
    assert norm.item() == pytest.approx(0.1, rel=1e-5)


def test_bf16_computes_in_bf16_and_keeps_fp32_masters() -> None:
    setup = build(make_config(precision="bf16"))
    types = {name: p.dtype for name, p in setup.model.named_parameters()}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == {name for name in types if ".router." in name}
    assert all(master.dtype == torch.float32 for master in setup.weights.master.values())
    assert all(buffer.dtype == torch.float32 for name, buffer in setup.model.named_buffers() if name.endswith("selection_bias"))
    exact = build(make_config())
    for name, master in setup.weights.master.items():
        assert torch.equal(master, exact.weights.master[name]), "masters start from the unrounded initialisation"
    setup.step(make_batch(0), 0)
    for name, parameter in setup.model.named_parameters():
        assert torch.equal(parameter, setup.weights.master[name].to(parameter.dtype)), name


def test_small_updates_survive_in_the_masters() -> None:
    """A rate far below bf16's resolution moves the masters though the rounded weights stand still."""
    config = make_config(precision="bf16")
    config.optim.lr = 1e-7
    setup = build(config)
    before = copy.deepcopy(setup.weights.master)
    setup.step(make_batch(0), 0)
    assert all(not torch.equal(before[name], master) for name, master in setup.weights.master.items() if "proj" in name)


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """Sixteen micro-batches in bf16: the sum differs from fp32's exact gradient no more than one whole bf16 batch does."""
    exact = build(make_config())
    exact.step(make_batch(0), 0)
    reference = exact.weights.gradients()
    errors = []
    for micro_batch in (16, 1):
        setup = build(make_config(precision="bf16", micro_batch=micro_batch))
        setup.step(make_batch(0), 0)
        gradients = setup.weights.gradients()
        assert all(g.dtype == torch.float32 for g in gradients.values()) == (micro_batch == 1)
        errors.append(sum((gradients[n].double() - reference[n].double()).square().sum().item() for n in reference) ** 0.5)
    assert errors[1] < 1.2 * errors[0]


def test_jitter_draws_the_same_for_a_step_whatever_ran_before() -> None:
    config = make_config(micro_batch=4)
    config.model.moe.router.jitter = 0.1
    first, second = build(config), build(config)
    torch.rand(1000)
    results = [first.step(make_batch(0), 5), second.step(make_batch(0), 5)]
    assert results[0].loss == results[1].loss
    torch.manual_seed(99)
    assert build(config).step(make_batch(0), 6).loss != results[0].loss


def test_the_prepass_of_exact_global_counts_leaves_no_trace() -> None:
    """With jitter, the counting pass and the training pass route alike, and load is counted once."""
    config = make_config(micro_batch=4)
    config.model.moe.router.jitter = 0.2
    setup = build(config)
    counted: list[dict[int, Tensor]] = []
    real = setup.step._global_load

    def spy(*args: object) -> dict[int, Tensor] | None:
        load = real(*args)  # type: ignore[arg-type]
        counted.append({layer: value.clone() for layer, value in (load or {}).items()})
        return load

    setup.step._global_load = spy  # type: ignore[method-assign]
    result = setup.step(make_batch(0), 0)
    assert counted[0].keys() == result.recorder.load.keys()
    for layer, load in result.recorder.load.items():
        assert torch.equal(load, counted[0][layer])


def test_muonclip_clips_hot_heads() -> None:
    config = make_config(micro_batch=4)
    config.optim.name, config.optim.qk_clip_tau = "muonclip", 1e-3
    setup = build(config)
    result = setup.step(make_batch(0), 0)
    assert set(result.recorder.qk_max) == {0, 1, 2, 3}
    assert result.clipped_heads == 8
    again = setup.step(make_batch(0), 1)
    for layer, before in result.recorder.qk_max.items():
        assert again.recorder.qk_max[layer].max() < before.max()
