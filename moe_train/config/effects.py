"""Options that would be silently ignored. A number that differs from its default and that nothing reads is an error, never a surprise."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from moe_train.config.errors import ConfigError
from moe_train.config.run import Config


class Rule(NamedTuple):
    """`keys` (relative to `section`) are read only where `active` holds."""

    section: str
    keys: tuple[str, ...]
    active: bool
    otherwise: str
    """The setting that makes them idle."""


def rules(config: Config) -> list[Rule]:
    """Every option that depends on another one."""
    return [*_attention_rules(config), *_ffn_rules(config), *_balance_rules(config), *_run_rules(config)]


GQA_ONLY = (
    "num_kv_heads",
    "head_dim",
    "qk_norm",
    "qkv_bias",
    "out_bias",
    "sliding_window",
    "sliding_window_every",
    "sinks",
    "rope.fraction",
)
MLA_ONLY = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
YARN_ONLY = ("factor", "original_max_seq_len", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def _attention_rules(config: Config) -> list[Rule]:
    a = config.model.attention
    return [
        Rule("model.attention", GQA_ONLY, a.kind == "gqa", "model.attention.kind=mla"),
        Rule("model.attention", MLA_ONLY, a.kind == "mla", "model.attention.kind=gqa"),
        Rule("model.attention", ("sliding_window_every",), a.sliding_window is not None, "model.attention.sliding_window=null"),
        Rule("model.attention.rope", YARN_ONLY, a.rope.scaling == "yarn", f"model.attention.rope.scaling={a.rope.scaling}"),
    ]


MOE_KEYS = ("num_experts", "top_k", "expert_hidden_size", "num_shared_experts", "expert_bias", "capacity_factor", "backend")
ROUTER_KEYS = (
    *("score", "normalize_topk", "scaling_factor", "num_groups", "topk_groups"),
    *("linear_bias", "selection_bias", "jitter", "force_balanced"),
)


def _ffn_rules(config: Config) -> list[Rule]:
    model, moe, router = config.model, config.model.moe, config.model.moe.router
    kinds = model.ffn_kinds()
    no_moe = "no MoE layer in the model"
    return [
        Rule("model.moe", MOE_KEYS, "moe" in kinds, no_moe),
        Rule("model.moe.router", ROUTER_KEYS, "moe" in kinds, no_moe),
        Rule("model", ("ffn_hidden_size",), "dense" in kinds, "no dense layer in the model (model.first_dense_layers=0)"),
        Rule("model", ("first_dense_layers",), not model.ffn_pattern, "model.ffn_pattern set"),
        Rule("model", ("swiglu_limit", "swiglu_alpha"), model.activation == "swiglu_clamped", f"model.activation={model.activation}"),
        Rule("model.mtp", ("loss_weight",), model.mtp.depth > 0, "model.mtp.depth=0"),
        Rule("model.init", ("cutoff",), model.init.scheme == "truncated_normal", f"model.init.scheme={model.init.scheme}"),
        Rule("model.moe", ("drop_policy", "pad_to_capacity"), moe.capacity_factor is not None, "model.moe.capacity_factor=null"),
        Rule("model.moe.router", ("softmax_order",), router.score == "softmax", f"model.moe.router.score={router.score}"),
        Rule(
            "model.moe.router",
            ("normalize_topk",),
            not (router.score == "softmax" and router.softmax_order == "after_topk"),
            "model.moe.router.softmax_order=after_topk (its weights sum to 1 anyway)",
        ),
        Rule("model.moe.router", ("topk_groups", "group_score"), router.num_groups > 1, "model.moe.router.num_groups=1"),
    ]


BALANCE_KEYS = ("aux_coef", "seq_aux_coef", "global_aux_coef", "z_coef", "bias", "sinkhorn_iterations", "alarm_max_vio")


def _balance_rules(config: Config) -> list[Rule]:
    balance, router = config.balance, config.model.moe.router
    return [
        Rule("balance", BALANCE_KEYS, "moe" in config.model.ffn_kinds(), "no MoE layer in the model (use balance=none)"),
        Rule("balance", ("global_counts",), balance.global_aux_coef != 0, "balance.global_aux_coef=0"),
        Rule("balance", ("bias_rate",), balance.bias == "sign", f"balance.bias={balance.bias}"),
        Rule("balance", ("quantile_bins",), balance.bias == "quantile", f"balance.bias={balance.bias}"),
        Rule("balance", ("bias",), balance.sinkhorn_iterations == 0, "balance.sinkhorn_iterations > 0 (Sinkhorn selects without the bias)"),
        Rule(
            "balance",
            ("bias", "sinkhorn_iterations"),
            not router.force_balanced,
            "model.moe.router.force_balanced=true (use balance=none)",
        ),
    ]


MUON_ONLY = ("adamw_lr", "muon_per_head", "muon_momentum", "muon_nesterov", "muon_steps", "muon_rms_scale")


def _run_rules(config: Config) -> list[Rule]:
    optim, train = config.optim, config.train
    schedule = f"optim.schedule.name={optim.schedule.name}"
    decays = optim.schedule.name in ("cosine", "wsd")
    return [
        Rule("optim", MUON_ONLY, optim.name in ("muon", "muonclip"), f"optim.name={optim.name}"),
        Rule("optim", ("qk_clip_tau",), optim.name == "muonclip", f"optim.name={optim.name}"),
        Rule("optim.schedule", ("decay_steps", "min_lr_ratio"), decays, schedule),
        Rule("train", ("recompute_parts",), train.recompute == "selective", f"train.recompute={train.recompute}"),
        Rule("train.batch_ramp", ("increment", "steps"), train.batch_ramp.start is not None, "train.batch_ramp.start=null"),
        Rule("data", ("vocab_size", "max_bytes"), config.data.kind == "python_stdlib", f"data.kind={config.data.kind}"),
        Rule("data", ("paths", "weights", "tokenizer"), config.data.kind == "indexed", f"data.kind={config.data.kind}"),
        Rule("demo", ("sample_tokens",), config.demo.sample is not None, "demo.sample=null"),
    ]


def refuse_idle_options(config: Config) -> None:
    """ConfigError that names every option without effect, the setting that idles it, and its default."""
    values, defaults = _flat(config), _flat(Config())
    for rule in rules(config):
        if rule.active:
            continue
        keys = [f"{rule.section}.{key}" for key in rule.keys]
        idle = [key for key in keys if values[key] != defaults[key]]
        if idle:
            given = ", ".join(f"{key}={_text(values[key])}" for key in idle)
            back = " ".join(f"{key}={_text(defaults[key])}" for key in idle)
            raise ConfigError(f"without effect: {given}, with {rule.otherwise}. Change that, or leave {back}.")


def _text(value: Any) -> str:
    """As it is written on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list) else str(value)


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """{'model.hidden_size': 256, …} of nested dataclasses."""
    flat: dict[str, Any] = {}
    for field in fields(node):
        value = getattr(node, field.name)
        flat |= _flat(value, f"{prefix}{field.name}.") if is_dataclass(value) else {prefix + field.name: value}
    return flat
