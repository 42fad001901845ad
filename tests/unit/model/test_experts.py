"""Every experts back end against the plain formula in fp64: outputs, all gradients, any count vector, and no look at a row of nobody."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moe_train.config import ConfigError, ModelConfig, MoEConfig
from moe_train.model.ffn import Activation
from moe_train.model.moe.experts import Experts, choose_backend

BACKENDS = ("loop", "grouped", "batched")
HIDDEN, WIDTH = 16, 24


def make(num_experts: int, backend: str, kind: str = "swiglu", bias: bool = False, dtype: torch.dtype = torch.float32) -> Experts:
    moe = MoEConfig(num_experts=num_experts, top_k=1, expert_hidden_size=WIDTH, expert_bias=bias, backend=backend)
    experts = Experts(ModelConfig(hidden_size=HIDDEN, activation=kind, swiglu_limit=1.0, moe=moe))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return experts.to(dtype)


def plain(rows: Tensor, counts: list[int], scale: Tensor, parameters: dict[str, Tensor], activation: Activation) -> Tensor:
    """Row by row, straight from the papers: the weight of a row multiplies what its expert returns."""
    outputs = []
    expert_of_row = [e for e, count in enumerate(counts) for _ in range(count)]
    for row, weight, e in zip(rows, scale, expert_of_row, strict=True):
        hidden = parameters["gate_up_proj"][e] @ row
        if "gate_up_bias" in parameters:
            hidden = hidden + parameters["gate_up_bias"][e]
        gate, up = hidden.chunk(2)
        if activation.kind == "swiglu":
            value = gate * gate.sigmoid() * up
        else:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            value = (up + 1) * gate * (activation.alpha * gate).sigmoid()
        out = parameters["down_proj"][e] @ value
        outputs.append(weight * (out + parameters["down_bias"][e] if "down_bias" in parameters else out))
    return torch.stack(outputs) if outputs else rows.new_zeros(0, HIDDEN)


def exact(experts: Experts, rows: Tensor, scale: Tensor, counts: list[int], grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients (of rows and their weights under the names "rows" and "scale") in fp64."""
    parameters = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
    rows64, scale64 = rows.detach().double().requires_grad_(), scale.detach().double().requires_grad_()
    out = plain(rows64, counts, scale64, parameters, experts.activation)
    inputs = {"rows": rows64, "scale": scale64, **parameters}
    grads = torch.autograd.grad(out, list(inputs.values()), grad.double(), allow_unused=True) if len(out) else [None] * len(inputs)
    zero = {name: torch.zeros_like(x) for name, x in inputs.items()}
    return out.detach(), {name: zero[name] if g is None else g for name, g in zip(inputs, grads, strict=True)}


def run(experts: Experts, rows: Tensor, scale: Tensor, counts: list[int], grad: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    rows, scale = rows.detach().requires_grad_(), scale.detach().requires_grad_()
    experts.zero_grad(set_to_none=True)
    out = experts(rows, torch.tensor(counts), scale)
    out.backward(grad)
    return out.detach(), {"rows": rows.grad, "scale": scale.grad, **{name: p.grad for name, p in experts.named_parameters()}}


def assert_equal(experts: Experts, counts: list[int]) -> None:
    rows, grad, scale = torch.randn(sum(counts), HIDDEN), torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts))
    out, grads = run(experts, rows, scale, counts, grad)
    true_out, true_grads = exact(experts, rows, scale, counts, grad)
    torch.testing.assert_close(out.double(), true_out, rtol=1e-4, atol=1e-5)
    for name, truth in true_grads.items():
        ours = grads[name]
        assert ours is not None, f"{name} got no gradient"
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "swiglu_clamped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_formula(backend: str, kind: str, bias: bool) -> None:
    assert_equal(make(5, backend, kind, bias), [16, 3, 0, 32, 1])


@pytest.mark.parametrize("backend", BACKENDS)
@given(counts=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_any_count_vector(backend: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    assert_equal(make(len(counts), backend, bias=True), counts)


@pytest.mark.parametrize("counts", [[0, 0, 0, 64], [64, 0, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_without_rows_get_zero_gradients_not_none(backend: str, counts: list[int]) -> None:
    experts = make(4, backend, bias=True)
    _, grads = run(experts, torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts)), counts, torch.randn(sum(counts), HIDDEN))
    for name, parameter in experts.named_parameters():
        grad = grads[name]
        assert grad is not None, f"{name} got no gradient"
        assert grad.shape == parameter.shape
        for e, count in enumerate(counts):
            assert bool(grad[e].any()) == bool(count), f"{name}[{e}]"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_nobody_are_never_read(backend: str, bias: bool) -> None:
    """Grouped matmuls leave rows past the last group unwritten, forward and backward: whatever is there must not spread."""
    experts, counts = make(3, backend, bias=bias), [5, 0, 11]
    used = sum(counts)
    rows, grad, scale = torch.randn(used + 9, HIDDEN), torch.randn(used + 9, HIDDEN), torch.rand(used + 9)
    true_out, true_grads = exact(experts, rows[:used], scale[:used], counts, grad[:used])
    rows[used:], grad[used:], scale[used:] = float("nan"), float("nan"), float("nan")
    out, grads = run(experts, rows, scale, counts, grad)
    torch.testing.assert_close(out[:used].double(), true_out, rtol=1e-4, atol=1e-5)
    grads["rows"], grads["scale"] = grads["rows"][:used], grads["scale"][:used]
    for name, truth in true_grads.items():
        torch.testing.assert_close(grads[name].double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "gate_up_bias", "down_bias", "all", "rows", "scale"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_weights_get_no_gradient_and_change_no_other(backend: str, frozen: str) -> None:
    experts, counts = make(3, backend, bias=True), [5, 0, 11]
    rows, grad, scale = torch.randn(16, HIDDEN), torch.randn(16, HIDDEN), torch.rand(16)
    _, all_grads = run(experts, rows, scale, counts, grad)
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_(frozen not in (name, "all"))
    rows.requires_grad_(frozen != "rows")
    scale.requires_grad_(frozen != "scale")
    experts.zero_grad(set_to_none=True)
    experts(rows, torch.tensor(counts), scale).backward(grad)
    for name, ours in {"rows": rows.grad, "scale": scale.grad, **{n: p.grad for n, p in experts.named_parameters()}}.items():
        if name == frozen or (frozen == "all" and name not in ("rows", "scale")):
            assert ours is None
        else:
            assert ours is not None
            torch.testing.assert_close(ours, all_grads[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_autograd_the_values_are_the_same(backend: str) -> None:
    experts, counts = make(3, backend), [5, 0, 11]
    rows, scale = torch.randn(16, HIDDEN), torch.rand(16)
    out, _ = run(experts, rows, scale, counts, torch.randn(16, HIDDEN))
    with torch.no_grad():
        torch.testing.assert_close(experts(rows, torch.tensor(counts), scale), out)


@pytest.mark.parametrize("kind", ["swiglu", "swiglu_clamped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_errs_no_more_than_plain_pytorch(backend: str, kind: str) -> None:
    experts, counts = make(4, backend, kind, dtype=torch.bfloat16), [64, 16, 0, 48]
    rows, grad, scale = torch.randn(128, HIDDEN).bfloat16(), torch.randn(128, HIDDEN).bfloat16(), torch.rand(128).bfloat16()
    true_out, true_grads = exact(experts, rows, scale, counts, grad)
    out, grads = run(experts, rows, scale, counts, grad)

    def plain_bf16(leaf: Tensor, weights: Tensor) -> Tensor:
        outputs = []
        for e, part in enumerate(leaf.split(counts)):
            hidden = torch.nn.functional.linear(part, experts.gate_up_proj[e])
            outputs.append(torch.nn.functional.linear(experts.activation(hidden), experts.down_proj[e]))
        return torch.cat(outputs) * weights[:, None]

    leaf, weights = rows.detach().requires_grad_(), scale.detach().requires_grad_()
    reference = plain_bf16(leaf, weights)
    names = ["rows", "scale", *dict(experts.named_parameters())]
    references = torch.autograd.grad(reference, [leaf, weights, *experts.parameters()], grad)
    assert error(out, true_out) <= 1.2 * error(reference, true_out)
    for name, theirs in zip(names, references, strict=True):
        assert error(grads[name], true_grads[name]) <= 1.2 * error(theirs, true_grads[name]), name


def error(value: Tensor | None, truth: Tensor) -> float:
    assert value is not None
    return float((value.double() - truth).norm().detach())


def test_second_backward_gives_the_same_gradients() -> None:
    """Nothing that backward reads is overwritten by it."""
    experts, counts = make(3, "loop"), [5, 0, 11]
    rows, scale = torch.randn(16, HIDDEN, requires_grad=True), torch.rand(16, requires_grad=True)
    out, grad = experts(rows, torch.tensor(counts), scale), torch.randn(16, HIDDEN)
    first = torch.autograd.grad(out, [rows, scale, *experts.parameters()], grad, retain_graph=True)
    second = torch.autograd.grad(out, [rows, scale, *experts.parameters()], grad)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


def test_auto_takes_the_loop_on_a_cpu_and_grouped_matmul_elsewhere() -> None:
    assert choose_backend("auto", "cpu") == "loop"
    assert choose_backend("auto", "cuda") == "grouped"
    assert choose_backend("batched", "cpu") == "batched"


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model\.moe\.backend=gruoped is not known.*Did you mean `grouped`"):
        make(2, "gruoped")
