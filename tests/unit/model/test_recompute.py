"""Law: recompute replays the routing. It never routes again, counts twice, or changes a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_train.config import AttentionConfig, BalanceConfig, ModelConfig, MoEConfig, MTPConfig, RouterConfig
from moe_train.model.batch import Batch, Denominators, Recorder
from moe_train.model.recompute import RoutingTape, routed
from moe_train.model.transformer import Transformer

SETTINGS = [("block",), ("attention",), ("ffn",), ("experts",), ("norms",), ("attention", "ffn"), ("norms", "experts"), ("norms", "ffn")]


def model(parts: tuple[str, ...], balance: BalanceConfig | None = None, moe: dict[str, Any] | None = None, **router: object) -> Transformer:
    config = ModelConfig(
        vocab_size=40,
        hidden_size=32,
        num_layers=3,
        ffn_hidden_size=48,
        first_dense_layers=1,
        attention=AttentionConfig(
            kind="mla", num_heads=2, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        moe=MoEConfig(8, 2, 16, 1, router=RouterConfig(score="sigmoid", **router), **(moe or {})),
        mtp=MTPConfig(1),
    )
    net = Transformer(config, balance or BalanceConfig(seq_aux_coef=0.1, z_coef=0.01, bias="quantile"), parts)
    net.init_weights(0)
    return net.train()


def whole() -> Batch:
    tokens = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(2))
    documents = torch.zeros_like(tokens)
    documents[0, 5:] = 1
    return Batch.from_tokens(tokens, documents)


def step(net: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor], Recorder]:
    torch.manual_seed(0)
    recorder = Recorder()
    loss = net(whole(), Denominators.of(whole(), 1), recorder).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, recorder


@pytest.mark.parametrize("parts", SETTINGS, ids=" ".join)
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_recompute_is_bit_equal_and_counts_once(parts: tuple[str, ...], jitter: float) -> None:
    loss, grads, recorder = step(model((), jitter=jitter))
    again, grads_again, recorder_again = step(model(parts, jitter=jitter))
    assert torch.equal(loss, again)
    assert grads.keys() == grads_again.keys()
    assert [name for name in grads if not torch.equal(grads[name], grads_again[name])] == []
    for layer, load in recorder.load.items():
        assert torch.equal(load, recorder_again.load[layer])
        assert torch.equal(recorder.required_bias[layer], recorder_again.required_bias[layer])
    assert recorder.losses == recorder_again.losses


@pytest.mark.parametrize("parts", [("block",), ("ffn",)], ids=" ".join)
def test_routing_of_the_forward_pass_is_used_although_the_router_would_now_choose_otherwise(parts: tuple[str, ...]) -> None:
    net = model(parts)
    recorder = Recorder()
    loss = net(whole(), Denominators.of(whole(), 1), recorder).loss
    seen: list[torch.Tensor] = []
    for block in net.blocks[1:]:
        block.ffn.router.selection_bias.copy_(torch.randn(8) * 100)
        block.ffn.router.register_forward_hook(lambda module, args, output: seen.append(output.expert_ids_NK))
    loss.backward()
    assert len(seen) == 2, "the recomputed pass must have run"
    counts = [torch.bincount(ids.flatten(), minlength=8) for ids in seen]
    assert torch.equal(counts[0], recorder.load[2])
    assert torch.equal(counts[1], recorder.load[1])


@pytest.mark.parametrize("parts", [("block",), ("ffn",)], ids=" ".join)
def test_buffered_counts_of_the_micro_batches_so_far_are_replayed(parts: tuple[str, ...]) -> None:
    """When a micro-batch is recomputed the counts in the recorder may have moved on; its loss must not see that."""
    balance = BalanceConfig(global_aux_coef=0.5, global_counts="buffer")
    found = []
    for recomputed in ((), parts):
        net, recorder, batch = model(recomputed, balance), Recorder(), whole()
        losses = [net(part, Denominators.of(batch, 1), recorder).loss for part in batch.split(1)]
        torch.stack(losses).sum().backward()  # all three recomputed after all three were counted
        found.append({name: parameter.grad for name, parameter in net.named_parameters()})
    assert [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])] == []


def test_choices_dropped_for_capacity_are_replayed_although_the_weights_now_rank_otherwise() -> None:
    net, recorder = model(("block",), moe={"capacity_factor": 0.5}), Recorder()
    kept: dict[int, list[torch.Tensor]] = {2: [], 1: []}
    for layer, calls in kept.items():
        net.blocks[layer].ffn.router.register_forward_hook(lambda module, args, output, calls=calls: calls.append(output.keep_NK))
    loss = net(whole(), Denominators.of(whole(), 1), recorder).loss
    for layer in kept:
        with torch.no_grad():
            net.blocks[layer].ffn.router.weight.neg_()
    loss.backward()
    for layer, (first, again) in kept.items():
        assert int(recorder.dropped[layer]) > 0
        assert torch.equal(first, again)


def test_recompute_keeps_no_activation() -> None:
    saved = {}
    for parts in ((), ("block",)):
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor

        net = model(parts)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            net(whole(), Denominators.of(whole(), 1)).loss.backward()
        saved[parts] = count
    assert saved["block",] < saved[()] / 2


def test_a_tape_plays_back_in_call_order() -> None:
    tape = RoutingTape()
    with tape.record():
        assert [int(routed(lambda: torch.tensor(i))) for i in range(3)] == [0, 1, 2]  # noqa: B023
    with tape.replay():
        assert [int(routed(lambda: torch.tensor(99))) for _ in range(3)] == [0, 1, 2]
    assert int(routed(lambda: torch.tensor(7))) == 7
