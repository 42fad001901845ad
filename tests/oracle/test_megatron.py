"""Attention, router, balancing, MTP and capacity against megatron-core at equal weights: losses, every gradient, the expert biases after
the step.

megatron runs in one subprocess for all cases (its CPU run needs patches of torch that no other test may see).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_names import megatron_names
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_train.config import AttentionConfig, BalanceConfig, ModelConfig, MoEConfig, MTPConfig, RopeConfig, RouterConfig
from moe_train.model.balancing import update_biases
from moe_train.model.batch import Batch, Denominators, Recorder
from moe_train.model.transformer import Transformer

VOCAB, HIDDEN, HEADS, LAYERS, EXPERTS, TOP_K, WIDTH = 96, 48, 4, 3, 8, 4, 20
ROWS, LENGTH = 3, 24
TOLERANCE = 1e-5

MLA = AttentionConfig(
    kind="mla", num_heads=HEADS, q_lora_rank=14, kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=6,
    rope=RopeConfig(interleaved=True),
)  # fmt: skip
GQA = AttentionConfig(kind="gqa", num_heads=HEADS, num_kv_heads=2, head_dim=12, qk_norm="per_head")
YARN = RopeConfig(
    interleaved=True, scaling="yarn", factor=40.0, original_max_seq_len=16, mscale=1.0, mscale_all_dim=0.7, truncate=True
)  # fmt: skip
SIGMOID = RouterConfig(score="sigmoid", scaling_factor=2.5)
SOFTMAX = RouterConfig(score="softmax", normalize_topk=False)
LATE_SOFTMAX = RouterConfig(score="softmax", softmax_order="after_topk")
BIAS_RATE = 0.01


@dataclass
class Case:
    attention: AttentionConfig
    router: RouterConfig
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    moe: dict[str, Any] = field(default_factory=dict)
    mtp_depth: int = 0
    micro_batches: int = 1
    bias: bool = False
    """The selection bias is not zero and moves by the sign rule."""

    def ours(self) -> ModelConfig:
        shared = {"num_experts": EXPERTS, "top_k": TOP_K, "expert_hidden_size": WIDTH, "num_shared_experts": 2}
        return ModelConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=LAYERS, first_dense_layers=1, ffn_hidden_size=40, norm_eps=1e-6,
            attention=self.attention, moe=MoEConfig(**shared, router=self.router, **self.moe), mtp=MTPConfig(self.mtp_depth, 0.3),
        )  # fmt: skip

    def theirs(self) -> dict[str, Any]:
        """Settings of megatron's TransformerConfig."""
        kinds, coefficients = self._balancing()
        router = self.router
        settings: dict[str, Any] = {
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "ffn_hidden_size": 40,
            "layernorm_epsilon": 1e-6,
            "qk_layernorm": True,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "moe_ffn_hidden_size": WIDTH,
            "moe_shared_expert_intermediate_size": 2 * WIDTH,
            "moe_layer_freq": [0, 1, 1],
            "moe_router_score_function": router.score,
            "moe_router_pre_softmax": router.score == "softmax" and router.softmax_order == "before_topk",
            "moe_router_load_balancing_type": kinds,
            "moe_aux_loss_coeff": coefficients,
            "moe_z_loss_coeff": self.balance.z_coef or None,
            "moe_router_enable_expert_bias": self.bias,
            "moe_router_bias_update_rate": BIAS_RATE,
            "moe_expert_capacity_factor": self.moe.get("capacity_factor"),
            "mtp_num_layers": self.mtp_depth or None,
            "mtp_loss_scaling_factor": 0.3,
        }
        if router.scaling_factor != 1:
            settings["moe_router_topk_scaling_factor"] = router.scaling_factor
        if router.num_groups > 1:
            settings |= {"moe_router_num_groups": router.num_groups, "moe_router_group_topk": router.topk_groups}
        return settings | self._their_attention()

    def _balancing(self) -> tuple[str, float]:
        if self.balance.sinkhorn_iterations:
            return "sinkhorn", 0.0
        for kind in ("aux", "seq_aux", "global_aux"):
            if coefficient := getattr(self.balance, f"{kind}_coef"):
                return f"{kind}_loss", coefficient
        return "none", 0.0

    def _their_attention(self) -> dict[str, Any]:
        a = self.attention
        if a.kind == "gqa":
            settings = {"num_query_groups": a.num_kv_heads, "kv_channels": a.head_dim, "rotary_percent": a.rope.fraction}
            return settings | {"rotary_base": int(a.rope.theta)}
        yarn = a.rope.scaling == "yarn"
        settings = {
            "q_lora_rank": a.q_lora_rank,
            "kv_lora_rank": a.kv_lora_rank,
            "qk_head_dim": a.qk_nope_head_dim,
            "qk_pos_emb_head_dim": a.qk_rope_head_dim,
            "v_head_dim": a.v_head_dim,
            "rope_type": "yarn" if yarn else "rope",
            "rotary_base": a.rope.theta,
        }
        if not yarn:
            # megatron multiplies the softmax scale by YaRN's factor in every MLA model.
            return settings | {"rotary_scaling_factor": 1.0}
        return settings | {
            "rotary_scaling_factor": a.rope.factor,
            "original_max_position_embeddings": a.rope.original_max_seq_len,
            "mscale": a.rope.mscale,
            "mscale_all_dim": a.rope.mscale_all_dim,
        }


def without_q_compression() -> AttentionConfig:
    return AttentionConfig(**{**vars(MLA), "q_lora_rank": None, "rope": YARN})


CASES = {
    "mla_sigmoid_bias_sequence": Case(MLA, SIGMOID, BalanceConfig(seq_aux_coef=0.1), bias=True),
    "mla_yarn_softmax_auxiliary_z": Case(without_q_compression(), SOFTMAX, BalanceConfig(aux_coef=0.1, z_coef=0.01)),
    "mla_groups_bias": Case(
        MLA, RouterConfig(**{**vars(SIGMOID), "num_groups": 4, "topk_groups": 2}), BalanceConfig(seq_aux_coef=0.1), bias=True
    ),
    "gqa_late_softmax_auxiliary": Case(GQA, LATE_SOFTMAX, BalanceConfig(aux_coef=0.1)),
    "gqa_partial_rotation_sequence": Case(
        AttentionConfig(**{**vars(GQA), "rope": RopeConfig(theta=1e6, fraction=0.5)}), SOFTMAX, BalanceConfig(seq_aux_coef=0.1)
    ),
    "global_batch_of_three_micro_batches": Case(
        GQA, SIGMOID, BalanceConfig(global_aux_coef=0.1, global_counts="buffer", z_coef=0.01), micro_batches=3
    ),
    "bias_over_two_micro_batches": Case(GQA, SIGMOID, BalanceConfig(seq_aux_coef=0.1), micro_batches=2, bias=True),
    "mtp_mla": Case(MLA, SIGMOID, mtp_depth=2),
    "mtp_gqa": Case(GQA, LATE_SOFTMAX, mtp_depth=1),
    "capacity": Case(GQA, SIGMOID, BalanceConfig(aux_coef=0.1), moe={"capacity_factor": 0.75}),
    "sinkhorn": Case(GQA, SOFTMAX, BalanceConfig(sinkhorn_iterations=200)),
}


def our_model(case: Case) -> Transformer:
    model = Transformer(case.ours(), case.balance)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("selection_bias"):
                tensor.copy_(0.2 * noise if case.bias else torch.zeros_like(noise))
            else:
                tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model.train()


def tokens_and_labels(case: Case) -> tuple[Tensor, Tensor]:
    """[M, B, T] each. Every position has a label."""
    text = torch.randint(0, VOCAB, (case.micro_batches, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(11))
    return text[..., :-1].contiguous(), text[..., 1:].contiguous()


def our_answer(case: Case) -> dict[str, Tensor]:
    """The same tensors as megatron_cpu.py writes."""
    model, (tokens_MBT, labels_MBT) = our_model(case), tokens_and_labels(case)
    whole = Batch(*(x.flatten(0, 1) for x in (tokens_MBT, labels_MBT)), torch.zeros_like(tokens_MBT).flatten(0, 1))
    counts, recorder = Denominators.of(whole, case.mtp_depth), Recorder()
    losses: list[Tensor] = []
    mtp_sums: list[Tensor] = []
    for part in whole.split(ROWS):
        output = model(part, counts, recorder)
        output.loss.backward()
        losses.append(output.lm_sum / part.tokens_BT.numel())
        mtp_sums.append(torch.stack(output.mtp_sums) if output.mtp_sums else torch.zeros(0))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = {"loss": torch.stack(losses)}
    found |= {f"gradient.{name}": tensor for name, tensor in megatron_names(gradients, case.ours()).items()}
    if case.mtp_depth:
        found["tracked.mtp"] = sum(mtp_sums) / torch.tensor(counts.mtp)
    if case.bias:
        update_biases(model, recorder, BalanceConfig(bias="sign", bias_rate=BIAS_RATE))
        biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("selection_bias")}
        found |= {f"bias.{name}": tensor for name, tensor in megatron_names(biases, case.ours()).items()}
    for ours, theirs in TRACKED.items():
        if ours in recorder.losses:
            values = [recorder.losses[ours].get(layer, torch.zeros(())) for layer in range(LAYERS)]
            # megatron sums over micro-batches, each with its own mean; ours are already divided by the global batch.
            found[f"tracked.{theirs}"] = torch.stack(values) * case.micro_batches
    return found


TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """What megatron says to every case."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, case in CASES.items():
        weights = {key: tensor.clone().contiguous() for key, tensor in megatron_names(our_model(case).state_dict(), case.ours()).items()}
        if not case.bias:
            weights = {key: tensor for key, tensor in weights.items() if not key.endswith("expert_bias")}
        tokens, labels = tokens_and_labels(case)
        save_file(weights | {"tokens": tokens, "labels": labels}, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(case.theirs()))
    script = Path(__file__).with_name("megatron_cpu.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: load_file(folder / f"{name}.answer.safetensors") for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_biases_agree(name: str, answers: dict[str, dict[str, Tensor]]) -> None:
    theirs, ours = answers[name], our_answer(CASES[name])
    assert theirs.keys() == ours.keys()
    errors = {key: float((ours[key] - truth).norm() / truth.norm()) for key, truth in theirs.items()}
    assert max(errors.values()) < TOLERANCE, {key: error for key, error in errors.items() if error >= TOLERANCE}
