"""The whole model against Hugging Face transformers at equal weights: loss, logits and every gradient.

Each case takes one of our presets, shrinks its sizes alone, and the published settings on the other side. In fp64 both must agree to
rounding; in fp32 ours may err from the fp64 truth no more than theirs does, but for a few roundings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from double_precision import double_precision
from hf_names import our_names
from torch import Tensor, nn

from moe_train.config import ModelConfig
from moe_train.config.compose import compose
from moe_train.model.attention import LayerCache
from moe_train.model.batch import Batch
from moe_train.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

VOCAB, HIDDEN, LAYERS, HEADS = 96, 48, 3, 4
TOKENS = (2, 40)
MLA_SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
"""All different, so that no two widths can be mixed up."""


def yarn(factor: float, theta: float, **more: Any) -> dict[str, Any]:
    """Trained on 16 positions, so that rows of 40 tokens go past it."""
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
    return scaling | {"rope_theta": theta} | more


@dataclass
class Case:
    preset: str
    architecture: str
    theirs: dict[str, Any]
    """Published settings of the transformers config."""
    ours: dict[str, Any] = field(default_factory=dict)
    """Sizes of our config that differ from the preset's."""

    def our_config(self) -> ModelConfig:
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "max_seq_len": 64,
            "attention.num_heads": HEADS,
        } | self.ours
        overrides = [f"model.{key}={value}" for key, value in sizes.items()]
        return compose([f"model={self.preset}", "data.vocab_size=96", "data.seq_len=40", *overrides]).model

    def their_model(self) -> nn.Module:
        sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
        sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "pad_token_id": None}
        config = getattr(transformers, f"{self.architecture}Config")(**(sizes | self.theirs))
        model_class = getattr(transformers, f"{self.architecture}ForCausalLM")
        return model_class._from_config(config, attn_implementation="eager", experts_implementation="eager")


def mla(preset: str, architecture: str, theirs: dict[str, Any], ours: dict[str, Any], q_lora_rank: int | None) -> Case:
    sizes = {"ffn_hidden_size": 40, "first_dense_layers": 1, "moe.num_experts": 8, "moe.top_k": 3, "moe.expert_hidden_size": 20}
    sizes |= {f"attention.{key}": value for key, value in MLA_SIZES.items()}
    if q_lora_rank:
        sizes["attention.q_lora_rank"] = q_lora_rank
    published = {"intermediate_size": 40, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3}
    published |= {"moe_intermediate_size": 20, "q_lora_rank": q_lora_rank, **MLA_SIZES}
    return Case(preset, architecture, published | theirs, sizes | ours)


YARN_16 = {"attention.rope.original_max_seq_len": 16}
GROUPS = {"moe.router.num_groups": 4, "moe.router.topk_groups": 2}
NO_GROUPS = {"n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "norm_topk_prob": True}
GQA = {"attention.num_kv_heads": 2, "attention.head_dim": 8, "moe.num_experts": 8, "moe.top_k": 3, "moe.expert_hidden_size": 20}
THEIR_GQA = {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 3}
GLM = {"ffn_hidden_size": 40, "first_dense_layers": 1}
THEIR_GLM = {"intermediate_size": 40, "first_k_dense_replace": 1, "n_routed_experts": 8, "moe_intermediate_size": 20, "n_shared_experts": 1}
THEIR_GLM |= {"routed_scaling_factor": 2.5, "attention_bias": True, "rms_norm_eps": 1e-5, "num_mtp_layers": 0}
THEIR_GLM |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}

CASES = {
    "deepseek_v3": mla(
        *("deepseek_v3", "DeepseekV3"),
        {"n_group": 4, "topk_group": 2, "num_mtp_layers": 0, "rope_parameters": yarn(40.0, 1e4, mscale=1.0, mscale_all_dim=1.0)},
        YARN_16 | GROUPS,
        q_lora_rank=14,
    ),
    "deepseek_v2": mla(
        *("deepseek_v2", "DeepseekV2"),
        {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
        | {"rope_parameters": yarn(40.0, 1e4, mscale=0.707, mscale_all_dim=0.707)},
        YARN_16 | GROUPS,
        q_lora_rank=14,
    ),
    "deepseek_v2_lite": mla(
        *("deepseek_v2_lite", "DeepseekV2"),
        {"topk_method": "greedy", "rope_parameters": yarn(40.0, 1e4, mscale=0.707, mscale_all_dim=0.707)},
        YARN_16,
        q_lora_rank=None,
    ),
    "kimi_k2": mla(
        *("kimi_k2", "DeepseekV3"),
        NO_GROUPS | {"routed_scaling_factor": 2.827, "rope_parameters": yarn(32.0, 5e4, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0)},
        YARN_16,
        q_lora_rank=14,
    ),
    "moonlight_16b_a3b": mla(
        *("moonlight_16b_a3b", "DeepseekV3"),
        # transformers keeps the latent norms at 1e-6 whatever the model's epsilon: Megatron, which trained it, and vLLM do not.
        NO_GROUPS | {"routed_scaling_factor": 2.446, "n_shared_experts": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"norm_eps": 1e-6},
        q_lora_rank=None,
    ),
    "qwen3_30b_a3b": Case(
        *("qwen3_30b_a3b", "Qwen3Moe"),
        THEIR_GQA
        | {"num_experts": 8, "moe_intermediate_size": 20, "norm_topk_prob": True, "rms_norm_eps": 1e-6}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        GQA,
    ),
    "mixtral_8x7b": Case(
        *("mixtral_8x7b", "Mixtral"),
        THEIR_GQA
        | {"num_local_experts": 8, "intermediate_size": 20, "rms_norm_eps": 1e-5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        GQA,
    ),
    "olmoe_1b_7b": Case(
        *("olmoe_1b_7b", "Olmoe"),
        {"num_experts": 8, "intermediate_size": 20, "num_experts_per_tok": 3, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        GQA | {"attention.num_kv_heads": HEADS, "attention.head_dim": HIDDEN // HEADS},
    ),
    "glm_4_5": Case("glm_4_5", "Glm4Moe", THEIR_GQA | THEIR_GLM | {"use_qk_norm": True}, GQA | GLM),
    "glm_4_5_air": Case("glm_4_5_air", "Glm4Moe", THEIR_GQA | THEIR_GLM | {"use_qk_norm": False, "routed_scaling_factor": 1.0}, GQA | GLM),
    "gpt_oss_20b": Case(
        *("gpt_oss_20b", "GptOss"),
        THEIR_GQA
        | {"num_local_experts": 8, "intermediate_size": 20, "rms_norm_eps": 1e-5, "sliding_window": 7, "swiglu_limit": 0.5}
        | {"rope_parameters": yarn(32.0, 1.5e5, truncate=False)},
        GQA | YARN_16 | {"attention.sliding_window": 7, "swiglu_limit": 0.5},
    ),
}


def randomize(model: nn.Module) -> None:
    """Weights large enough that attention, routing and clamps all matter; norms near 1; biases and sinks not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
                tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise if tensor.dim() > 1 else 0.5 * noise)


def their_run(case: Case, model: nn.Module, tokens_BT: Tensor) -> dict[str, Tensor]:
    """Loss, logits and gradients by our names."""
    output = model(tokens_BT, labels=tokens_BT)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": output.loss, "logits": output.logits} | our_names(gradients, case.architecture == "GptOss")


def our_run(model: Transformer, tokens_BT: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        logits = model.logits(tokens_BT)
    loss = model(Batch.from_tokens(tokens_BT)).loss
    loss.backward()
    return {"loss": loss, "logits": logits} | {name: parameter.grad for name, parameter in model.named_parameters()}


def build(case: Case) -> tuple[nn.Module, Transformer]:
    """Both models with the same weights, in the precision of the moment."""
    theirs, ours = case.their_model(), Transformer(case.our_config())
    randomize(theirs)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if "inv_freq" not in name}
    state = our_names(state, case.architecture == "GptOss")
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith("selection_bias") for name in missing), missing
    return theirs, ours


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.detach().double() - truth.detach()).norm() / truth.detach().norm())


@pytest.mark.parametrize("name", CASES)
def test_equal_logits_and_gradients(name) -> None:
    case = CASES[name]
    tokens_BT = torch.randint(0, VOCAB, TOKENS)
    with double_precision():
        theirs, ours = build(case)
        truth, exact = their_run(case, theirs, tokens_BT), our_run(ours, tokens_BT)
    assert truth.keys() == exact.keys()
    worst = {key: error(exact[key], truth[key]) for key in truth}
    assert max(worst.values()) < 1e-11, {key: value for key, value in worst.items() if value >= 1e-11}
    theirs, ours = build(case)
    their_fp32, our_fp32 = their_run(case, theirs, tokens_BT), our_run(ours, tokens_BT)
    few_roundings = 16 * torch.finfo(torch.float32).eps
    for key in truth:
        allowed = 2 * error(their_fp32[key], truth[key]) + few_roundings
        assert error(our_fp32[key], truth[key]) <= allowed, key


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_and_cached_tokens(name) -> None:
    """Documents that share a row have the logits of documents alone, and so have tokens that follow a cached prompt one by one."""
    case = CASES[name]
    first, second = torch.randint(0, VOCAB, (1, 17)), torch.randint(0, VOCAB, (1, 23))
    ids_BT = torch.tensor([[0] * 17 + [1] * 23])
    with double_precision(), torch.no_grad():
        theirs, ours = build(case)
        truth = torch.cat([theirs(first).logits, theirs(second).logits], dim=1)
        assert error(ours.logits(torch.cat([first, second], dim=1), ids_BT), truth) < 1e-11
        cache = [LayerCache() for _ in ours.blocks]
        chunks = second.split([9, 1, 1, 1, 3, 1, 1, 6], dim=1)
        assert error(torch.cat([ours.logits(chunk, cache=cache) for chunk in chunks], dim=1), truth[:, 17:]) < 1e-11
