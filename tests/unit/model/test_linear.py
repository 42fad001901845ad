"""fp32 products through oneDNN: the same values and gradients as PyTorch's own, wherever they are used."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_train.config import ModelConfig, MoEConfig
from moe_train.model import linear as linear_module
from moe_train.model.attention import blocked
from moe_train.model.attention.attend import attend
from moe_train.model.attention.mask import AttentionMask
from moe_train.model.linear import Linear, onednn_is_faster, product, product_out, use_onednn
from moe_train.model.moe.experts import Experts

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN for every fp32 product, whatever the machine."""
    monkeypatch.setattr(linear_module, "SMALLEST_PRODUCT", 1)
    monkeypatch.setattr(linear_module, "onednn_is_faster", lambda: True)


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 3), (16, 64, 32), (33, 20, 40)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.usefixtures("forced")
def test_product_equals_matmul(shape: tuple[int, int, int], transposed: bool) -> None:
    rows, inputs, outputs = shape
    x = torch.randn(inputs, rows).t() if transposed else torch.randn(rows, inputs)
    weight = torch.randn(inputs, outputs).t() if transposed else torch.randn(outputs, inputs)
    assert use_onednn(x, rows, inputs, outputs)
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(product(x, weight), exact, rtol=1e-5, atol=1e-5)
    out = torch.full((rows, outputs), float("nan"))
    assert product_out(x, weight, out) is out
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("forced")
def test_arguments_with_gaps_between_rows() -> None:
    x, weight = torch.randn(9, 40)[:, 3:19], torch.randn(7, 50)[:, 20:36]
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(product(x, weight), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(weight, x), exact.t(), rtol=1e-5, atol=1e-5)
    strided = torch.randn(16, 30)[:, :7].t()
    torch.testing.assert_close(product(x, strided), (x.double() @ strided.double().t()).float(), rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", ["none", "weight", "x"])
@pytest.mark.usefixtures("forced")
def test_linear_equals_torch(bias: bool, frozen: str) -> None:
    layer = Linear(8, 12, bias=bias)
    layer.weight.requires_grad_(frozen != "weight")
    x = torch.randn(2, 5, 8, requires_grad=frozen != "x")
    grad = torch.randn(2, 5, 12)
    y = layer(x)
    y.backward(grad)
    ours = [x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    layer.zero_grad(set_to_none=True)
    reference = F.linear(x, layer.weight, layer.bias)
    reference.backward(grad)
    torch.testing.assert_close(y, reference)
    for mine, theirs in zip(ours, [x.grad, *(p.grad for p in layer.parameters())], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_one_group_at_a_time_equals_the_whole_batch(monkeypatch, packed: bool, window: int | None, sinks: bool) -> None:
    num_tokens = 150
    documents = (torch.rand(2, num_tokens) < 0.05).long().cumsum(1) if packed else torch.zeros(2, num_tokens, dtype=torch.long)
    visible = AttentionMask(documents, window).visible(window)
    shapes = [(2, num_tokens, heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]
    inputs += [torch.randn(4, requires_grad=True)] if sinks else []
    grad = torch.randn(2, 4, num_tokens, 8)

    def run() -> list[torch.Tensor]:
        out = attend(*inputs[:3], visible, 0.3, inputs[3] if sinks else None)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    whole = run()
    monkeypatch.setattr(blocked, "ROWS_ALONE", 1)
    monkeypatch.setattr(linear_module, "SMALLEST_PRODUCT", 1)
    monkeypatch.setattr(linear_module, "onednn_is_faster", lambda: True)
    for apart, together in zip(run(), whole, strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.usefixtures("forced")
def test_compiled_linear_equals_eager() -> None:
    """By the default back end: its own lowering of oneDNN's product refuses weights that train."""
    torch._dynamo.reset()
    layer, x = Linear(16, 8), torch.randn(12, 16, requires_grad=True)

    def run(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = call(x).relu()
        return (y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))

    eager = run(layer)
    for compiled, plain in zip(run(torch.compile(layer, fullgraph=True)), eager, strict=True):
        torch.testing.assert_close(compiled, plain)
    torch._dynamo.reset()


@needs_onednn
@pytest.mark.usefixtures("forced")
def test_experts_equal_double_precision() -> None:
    experts = Experts(ModelConfig(hidden_size=16, moe=MoEConfig(num_experts=3, top_k=1, expert_hidden_size=24, backend="loop")))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    rows, counts, grad = torch.randn(37, 16, requires_grad=True), torch.tensor([20, 0, 17]), torch.randn(37, 16)
    scale = torch.rand(37)
    inputs = [rows, *experts.parameters()]
    out = experts(rows, counts, scale)
    grads = torch.autograd.grad(out, inputs, grad)
    double = Experts(ModelConfig(hidden_size=16, moe=MoEConfig(num_experts=3, top_k=1, expert_hidden_size=24, backend="loop"))).double()
    double.load_state_dict(experts.state_dict())
    rows64 = rows.detach().double().requires_grad_()
    out64 = double(rows64, counts, scale.double())
    torch.testing.assert_close(out.double(), out64, rtol=1e-5, atol=1e-5)
    for ours, exact in zip(grads, torch.autograd.grad(out64, [rows64, *double.parameters()], grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


def test_the_rule_looks_at_machine_precision_and_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(onednn_is_faster(), bool)
    monkeypatch.setattr(linear_module, "onednn_is_faster", lambda: True)
    assert use_onednn(torch.zeros(1), 512, 512, 512)
    assert not use_onednn(torch.zeros(1), 4, 4, 4)
    assert not use_onednn(torch.zeros(1, dtype=torch.bfloat16), 512, 512, 512)
    assert not use_onednn(torch.zeros(1, dtype=torch.float64), 512, 512, 512)
    assert not use_onednn(torch.zeros(1, device="meta"), 512, 512, 512)
