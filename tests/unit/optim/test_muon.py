"""Muon against torch.optim.Muon and a plain fp64 formula; logical matrices; who goes to Muon and who to AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_train.config import AttentionConfig, ModelConfig, MoEConfig, MTPConfig, OptimConfig, RouterConfig
from moe_train.model.transformer import Transformer
from moe_train.optim import build_optimizer, muon
from moe_train.optim.matrices import Split
from moe_train.optim.muon import Muon
from moe_train.optim.newton_schulz import newton_schulz


def plain_newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """One 2-D matrix in fp64, transposed so that rows <= columns."""
    x = matrix.double()
    if x.shape[0] > x.shape[1]:
        return plain_newton_schulz(matrix.T, steps).T
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def make(parameters: dict[str, Tensor], splits: dict[str, Split], nesterov: bool = True) -> Muon:
    return Muon(parameters, splits, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, steps=5, rms_scale=0.2)


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (40, 40), (1, 16)])
def test_newton_schulz_equals_the_plain_formula(shape: tuple[int, int]) -> None:
    batch = torch.randn(3, *shape)
    expected = torch.stack([plain_newton_schulz(matrix) for matrix in batch])
    torch.testing.assert_close(newton_schulz(batch, 5, torch.float32).double(), expected, rtol=1e-4, atol=1e-5)


def test_newton_schulz_makes_singular_values_about_one_and_keeps_zero() -> None:
    values = torch.linalg.svdvals(newton_schulz(torch.randn(2, 24, 64), 5, torch.float32))
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert newton_schulz(torch.zeros(1, 4, 4), 5, torch.float32).abs().max() == 0


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_equals_torch_muon_within_its_own_rounding(shape: tuple[int, int], nesterov: bool) -> None:
    """torch.optim.Muon iterates in bf16; ours must be as near to it as it is to an fp64 reference."""
    start = torch.randn(shape)
    ours, theirs, exact = start.clone(), torch.nn.Parameter(start.clone()), start.double()
    optimizer = make({"w": ours}, {"w": Split(1, (shape[0],))}, nesterov)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    buffer = torch.zeros(shape, dtype=torch.float64)
    for step in range(3):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        optimizer.step({"w": grad}, 1.0, 1.0)
        theirs.grad = grad
        reference.step()
        buffer = 0.95 * buffer + grad.double()
        update = plain_newton_schulz(grad.double() + 0.95 * buffer if nesterov else buffer)
        exact = exact * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(max(shape)) * update
    rounding = (theirs.data - exact).norm()
    assert (ours - exact).norm() < 1e-3 * rounding + 1e-5 * exact.norm()
    assert (ours - theirs.data).norm() < 1.01 * rounding + 1e-5 * exact.norm()


def test_bf16_iteration_is_as_exact_as_torchs() -> None:
    grad, shape = torch.randn(24, 40), (24, 40)
    ours, theirs = torch.zeros(shape), torch.nn.Parameter(torch.zeros(shape))
    Muon({"w": ours}, {"w": Split(1, (24,))}, 0.02, 0.1, 0.95, True, 5, 0.2, torch.bfloat16).step({"w": grad}, 1.0, 1.0)
    theirs.grad = grad
    torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    exact = -0.02 * 0.2 * math.sqrt(40) * plain_newton_schulz(grad)
    assert (ours - exact).norm() < 1.5 * (theirs.data - exact).norm()


def test_stacked_experts_are_orthogonalised_one_by_one_gate_and_up_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    num_experts, width, hidden = 5, 6, 8
    start, grad = torch.randn(num_experts, 2 * width, hidden), torch.randn(num_experts, 2 * width, hidden)
    expected = start.clone()
    for e in range(num_experts):
        for rows in (slice(0, width), slice(width, 2 * width)):
            update = plain_newton_schulz(1.95 * grad[e, rows]).float()
            expected[e, rows] = start[e, rows] * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(hidden) * update
    for limit in (1 << 22, 2 * width * hidden, 1):
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", limit)
        ours = start.clone()
        make({"w": ours}, {"w": Split(num_experts, (width, width))}).step({"w": grad}, 1.0, 1.0)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_clip_factor_and_bf16_gradients() -> None:
    grad = torch.randn(8, 12).bfloat16()
    first, second = torch.ones(8, 12), torch.ones(8, 12)
    one, two = make({"w": first}, {"w": Split(1, (8,))}), make({"w": second}, {"w": Split(1, (8,))})
    one.step({"w": grad}, 1.0, 0.25)
    two.step({"w": grad.float() * 0.25}, 1.0, 1.0)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.momentum["w"], grad.float() * 0.25)


def mla_model(q_lora: int | None = 16) -> Transformer:
    attention = AttentionConfig(
        kind="mla", num_heads=2, q_lora_rank=q_lora, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    )
    moe = MoEConfig(4, 2, 16, 1, expert_bias=True, router=RouterConfig(score="sigmoid", linear_bias=True))
    return Transformer(
        ModelConfig(
            vocab_size=64,
            hidden_size=32,
            num_layers=2,
            ffn_hidden_size=48,
            first_dense_layers=1,
            attention=attention,
            moe=moe,
            mtp=MTPConfig(1),
        )
    )


def masters(model: Transformer) -> dict[str, Tensor]:
    return {name: p.data for name, p in model.named_parameters()}


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    model = mla_model()
    optimizer = build_optimizer(model, masters(model), OptimConfig(name="muon", lr=0.02, adamw_lr=0.001))
    assert optimizer.muon is not None
    rest, matrices = set(optimizer.adamw.parameters), set(optimizer.muon.parameters)
    assert rest | matrices == set(masters(model))
    assert not rest & matrices
    words = ("embedding.weight", "head.weight", "router", "norm", "bias")
    assert rest == {name for name in masters(model) if any(word in name for word in words)}
    assert (optimizer.muon.lr, optimizer.adamw.lr) == (0.02, 0.001)
    assert optimizer.adamw.decayed == {name for name in rest if name.endswith(("embedding.weight", "head.weight", "router.weight"))}


def test_decay_all_is_olmoes_rule() -> None:
    model = mla_model()
    optimizer = build_optimizer(model, masters(model), OptimConfig(decay_all=True))
    assert optimizer.adamw.decayed == set(masters(model))


def test_logical_matrices_of_a_model() -> None:
    model = mla_model()
    muon_part = build_optimizer(model, masters(model), OptimConfig(name="muon")).muon
    assert muon_part is not None
    splits = muon_part.splits
    assert splits["blocks.0.attention.q_up_proj.weight"] == Split(2, (12,))
    assert splits["blocks.0.attention.kv_up_proj.weight"] == Split(2, (8, 6))
    assert splits["blocks.0.attention.o_proj.weight"] == Split(1, (32,))
    assert splits["blocks.0.ffn.gate_up_proj.weight"] == Split(1, (48, 48))
    assert splits["blocks.1.ffn.experts.gate_up_proj"] == Split(4, (16, 16))
    assert splits["blocks.1.ffn.experts.down_proj"] == Split(4, (32,))
    assert splits["mtp.0.block.attention.q_up_proj.weight"] == Split(2, (12,))
    whole = build_optimizer(model, masters(model), OptimConfig(name="muon", muon_per_head=False)).muon
    assert whole is not None
    assert whole.splits["blocks.0.attention.q_up_proj.weight"] == Split(1, (24,))


def test_gqa_projections_split_by_head() -> None:
    attention = AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8)
    model = Transformer(ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, attention=attention, moe=MoEConfig(4, 2, 16)))
    muon_part = build_optimizer(model, masters(model), OptimConfig(name="muon")).muon
    assert muon_part is not None
    assert muon_part.splits["blocks.0.attention.q_proj.weight"] == Split(4, (8,))
    assert muon_part.splits["blocks.0.attention.v_proj.weight"] == Split(2, (8,))


def test_every_element_of_every_matrix_moves() -> None:
    model = mla_model(q_lora=None)
    model.init_weights(0)
    before = {name: tensor.clone() for name, tensor in masters(model).items()}
    optimizer = build_optimizer(model, masters(model), OptimConfig(name="muon", weight_decay=0.0))
    optimizer.step({name: torch.randn_like(tensor) for name, tensor in before.items()}, 1.0, 1.0)
    for name, tensor in masters(model).items():
        assert (tensor != before[name]).float().mean() > 0.99, name
