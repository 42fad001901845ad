"""The outside judge for whole models: Hugging Face transformers with the same weights gives the same logits and the same gradients.

Tiny random configs, no download. fp32; the bound of 1e-5 on ‖difference‖ / ‖value‖ is some ten times what transformers itself moves
between fp32 and fp64 (printed when a case fails).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_names import our_names
from torch.nn import functional as F

from moe_train.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig, RouterConfig
from moe_train.model.batch import Batch
from moe_train.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

V, D, L, T, E, K, FE, FD = 50, 32, 3, 24, 8, 2, 16, 48
BASE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
MLA: dict[str, Any] = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 10, "qk_nope_head_dim": 6, "num_key_value_heads": 4}
DEEP: dict[str, Any] = {
    "intermediate_size": FD,
    "moe_intermediate_size": FE,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "first_k_dense_replace": 1,
}


def yarn(mscale: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def mla(q_lora_rank: int | None, mscale: float | None) -> AttentionConfig:
    rope = RopeConfig(interleaved=True)
    if mscale is not None:
        rope = RopeConfig(interleaved=True, scaling="yarn", factor=40.0, original_max_seq_len=16, mscale=mscale, mscale_all_dim=mscale)
    return AttentionConfig(
        kind="mla", num_heads=4, q_lora_rank=q_lora_rank, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=10, rope=rope
    )


def gqa(kv: int = 2, theta: float = 10000.0, **options: Any) -> AttentionConfig:
    rope = options.pop("rope", None) or RopeConfig(theta=theta, fraction=options.pop("fraction", 1.0))
    return AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=kv, head_dim=8, rope=rope, **options)


def ours(attention: AttentionConfig, router: RouterConfig, shared: int = 0, dense: int = 0, **options: Any) -> ModelConfig:
    moe = MoEConfig(E, K, FE, shared, expert_bias=options.pop("expert_bias", False), router=router)
    return ModelConfig(
        vocab_size=V, hidden_size=D, num_layers=L, ffn_hidden_size=FD if dense else 0, first_dense_layers=dense,
        attention=attention, moe=moe, **options,
    )  # fmt: skip


def deepseek_v3() -> tuple[Any, ModelConfig]:
    config = transformers.DeepseekV3Config(
        **BASE, **MLA, **DEEP, q_lora_rank=12, n_shared_experts=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        rope_interleave=True, rope_parameters=yarn(1.0),
    )  # fmt: skip
    router = RouterConfig(score="sigmoid", scaling_factor=2.5, num_groups=4, topk_groups=2, selection_bias=True)
    return transformers.DeepseekV3ForCausalLM(config), ours(mla(12, 1.0), router, 1, 1)


def deepseek_v2(q_lora_rank: int | None) -> tuple[Any, ModelConfig]:
    grouped = q_lora_rank is not None
    config = transformers.DeepseekV2Config(
        **BASE, **MLA, **DEEP, q_lora_rank=q_lora_rank, n_shared_experts=2, n_group=4 if grouped else 1, topk_group=2 if grouped else 1,
        topk_method="group_limited_greedy" if grouped else "greedy", norm_topk_prob=False, routed_scaling_factor=16.0 if grouped else 1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    router = RouterConfig(normalize_topk=False, scaling_factor=16.0, num_groups=4, topk_groups=2, group_score="max")
    plain = RouterConfig(normalize_topk=False)
    return transformers.DeepseekV2ForCausalLM(config), ours(mla(q_lora_rank, None), router if grouped else plain, 2, 1)


def qwen3() -> tuple[Any, ModelConfig]:
    config = transformers.Qwen3MoeConfig(
        **BASE, num_key_value_heads=2, head_dim=8, moe_intermediate_size=FE, intermediate_size=FD, num_experts=E, num_experts_per_tok=K,
        norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config), ours(gqa(theta=1e6, qk_norm="per_head"), RouterConfig())


def mixtral() -> tuple[Any, ModelConfig]:
    config = transformers.MixtralConfig(
        **BASE, num_key_value_heads=2, head_dim=8, intermediate_size=FE, num_local_experts=E, num_experts_per_tok=K, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    router = RouterConfig(softmax_order="after_topk")
    return transformers.MixtralForCausalLM(config), ours(gqa(theta=1e6), router, norm_eps=1e-5)


def olmoe() -> tuple[Any, ModelConfig]:
    config = transformers.OlmoeConfig(
        **BASE, num_key_value_heads=4, intermediate_size=FE, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return transformers.OlmoeForCausalLM(config), ours(gqa(4, qk_norm="full_width"), RouterConfig(normalize_topk=False), norm_eps=1e-5)


def glm(qk_norm: bool) -> tuple[Any, ModelConfig]:
    config = transformers.Glm4MoeConfig(
        **BASE, **DEEP, num_key_value_heads=2, head_dim=8, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, attention_bias=True, use_qk_norm=qk_norm, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    router = RouterConfig(score="sigmoid", scaling_factor=2.5, selection_bias=True)
    attention = gqa(theta=1e6, fraction=0.5, qkv_bias=True, qk_norm="per_head" if qk_norm else "none")
    return transformers.Glm4MoeForCausalLM(config), ours(attention, router, 1, 1, norm_eps=1e-5)


def gpt_oss() -> tuple[Any, ModelConfig]:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    scaling = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = transformers.GptOssConfig(
        **BASE, num_key_value_heads=2, head_dim=8, intermediate_size=FE, num_local_experts=E, num_experts_per_tok=K, sliding_window=5,
        layer_types=layers, rope_parameters={**scaling, "original_max_position_embeddings": 16},
    )  # fmt: skip
    rope = RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, original_max_seq_len=16, truncate=False)
    attention = gqa(rope=rope, qkv_bias=True, out_bias=True, sinks=True, sliding_window=5, sliding_window_every=2)
    router = RouterConfig(softmax_order="after_topk", linear_bias=True)
    return transformers.GptOssForCausalLM(config), ours(attention, router, activation="swiglu_clamped", expert_bias=True, norm_eps=1e-5)


CASES = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v2": lambda: deepseek_v2(12),
    "deepseek_v2_lite": lambda: deepseek_v2(None),
    "qwen3": qwen3,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "glm_4_5": lambda: glm(True),
    "glm_4_5_air": lambda: glm(False),
    "gpt_oss": gpt_oss,
}


def randomise(model: torch.nn.Module) -> None:
    """Weights far from any symmetry: every bias, norm, sink and correction takes part."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))


def judge(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of the mean next-token loss."""
    model.train()
    logits = model(input_ids=tokens, use_cache=False, output_router_logits=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_equal_logits_and_gradients(case: str) -> None:
    theirs, config = CASES[case]()
    theirs.float()
    randomise(theirs)
    interleaved = case == "gpt_oss"
    model = Transformer(config)
    state = {name: t for name, t in theirs.state_dict().items() if "inv_freq" not in name}
    mapped = our_names(state, interleaved)
    missing = set(model.state_dict()) - set(mapped)
    assert all(name.endswith("selection_bias") for name in missing)
    for name in missing:
        mapped[name] = torch.zeros(E)
    model.load_state_dict(mapped, strict=True)
    tokens = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(1))

    wanted, grads = judge(theirs, tokens)
    exact, _ = judge(copy.deepcopy(theirs).double(), tokens)
    own = relative(wanted, exact)
    with torch.no_grad():
        error = relative(model.logits(tokens), wanted)
    assert error < 1e-5, f"logits differ by {error:.2e}; transformers itself by {own:.2e} between fp32 and fp64"

    model.train()
    model(Batch.from_tokens(tokens)).loss.backward()
    wanted_grads = our_names(grads, interleaved)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = relative(parameter.grad, wanted_grads[name])
        assert error < 2e-5, f"the gradient of {name} differs by {error:.2e}"
