"""One check of the whole config before anything is built: every number that cannot work, with the numbers and the way out (ConfigError)."""

from __future__ import annotations

import math
from collections.abc import Callable

from moe_train.config import balance as balances
from moe_train.config import model as models
from moe_train.config import run as runs
from moe_train.config.effects import refuse_idle_options
from moe_train.config.errors import ConfigError, require_choice
from moe_train.config.model import AttentionConfig, ModelConfig
from moe_train.config.run import Config
from parallel.layout import DEGREES, FILL, Layout, LayoutError, check_model, fits_model, make_layout, smallest_world


def validate(config: Config) -> None:
    """Raise ConfigError for the first thing that cannot work."""
    _choices(config)
    _sizes(config)
    validate_model(config.model)
    _balance(config)
    _data(config)
    _train(config)
    _optim(config)
    _layout(config)
    refuse_idle_options(config)


def validate_model(model: ModelConfig) -> None:
    """The checks that need the model alone (bench and `inspect` call it too). Choices and sizes are checked by `validate`."""
    _ffn(model)
    _attention(model.attention)
    if "moe" in model.ffn_kinds():
        _moe(model)
    if model.mtp.depth and model.mtp.depth >= model.max_seq_len:
        raise ConfigError(f"model.mtp.depth={model.mtp.depth} must be below model.max_seq_len={model.max_seq_len}.")


def _choices(config: Config) -> None:
    model, attention, router = config.model, config.model.attention, config.model.moe.router
    for key, value, choices in (
        ("model.attention.kind", attention.kind, models.ATTENTIONS),
        ("model.attention.qk_norm", attention.qk_norm, models.QK_NORMS),
        ("model.attention.rope.scaling", attention.rope.scaling, models.ROPE_SCALINGS),
        ("model.activation", model.activation, models.ACTIVATIONS),
        ("model.moe.drop_policy", model.moe.drop_policy, models.DROP_POLICIES),
        ("model.moe.backend", model.moe.backend, models.EXPERT_BACKENDS),
        ("model.moe.router.score", router.score, models.ROUTER_SCORES),
        ("model.moe.router.softmax_order", router.softmax_order, models.SOFTMAX_ORDERS),
        ("model.moe.router.group_score", router.group_score, models.GROUP_SCORES),
        ("model.init.scheme", model.init.scheme, models.INITS),
        ("balance.bias", config.balance.bias, balances.BIAS_RULES),
        ("balance.global_counts", config.balance.global_counts, balances.GLOBAL_COUNTS),
        ("data.kind", config.data.kind, runs.DATA_KINDS),
        ("optim.name", config.optim.name, runs.OPTIMIZERS),
        ("optim.schedule.name", config.optim.schedule.name, runs.SCHEDULES),
        ("train.precision", config.train.precision, runs.PRECISIONS),
        ("train.recompute", config.train.recompute, runs.RECOMPUTES),
    ):
        require_choice(key, value, choices)
    for key, values, choices in (
        ("model.ffn_pattern", model.ffn_pattern or [], models.FFNS),
        ("train.recompute_parts", config.train.recompute_parts, runs.RECOMPUTE_PARTS),
        ("log.loggers", config.log.loggers, runs.LOGGERS),
    ):
        for value in values:
            require_choice(key, value, choices)
        if key != "model.ffn_pattern" and len(set(values)) < len(values):
            raise ConfigError(f"{key}=[{','.join(values)}] names one entry twice.")


POSITIVE = (
    *("model.vocab_size", "model.hidden_size", "model.num_layers", "model.max_seq_len", "model.norm_eps", "model.init.std"),
    *("model.init.cutoff", "model.attention.num_heads", "model.attention.rope.theta", "model.attention.sliding_window_every"),
    *("model.moe.router.num_groups", "model.moe.router.topk_groups", "model.moe.router.scaling_factor", "model.swiglu_limit"),
    *("balance.quantile_bins", "balance.bias_rate", "balance.alarm_max_vio", "data.seq_len", "data.vocab_size", "optim.lr"),
    *("optim.eps", "optim.muon_steps", "optim.muon_rms_scale", "optim.qk_clip_tau", "train.steps", "train.global_batch"),
    *("train.micro_batch", "train.keep_checkpoints", "train.max_skipped_steps", "train.eval_sequences", "log.every", "demo.sample_tokens"),
)
"""Must be above 0."""
OPTIONAL_POSITIVE = (
    *("model.attention.sliding_window", "model.attention.q_lora_rank", "model.moe.capacity_factor", "data.max_bytes"),
    *("optim.adamw_lr", "optim.schedule.decay_steps", "train.threads", "train.batch_ramp.start"),
)
"""null or above 0."""
NOT_NEGATIVE = (
    *("model.ffn_hidden_size", "model.first_dense_layers", "model.mtp.depth", "model.mtp.loss_weight", "model.moe.num_shared_experts"),
    *("balance.aux_coef", "balance.seq_aux_coef", "balance.global_aux_coef", "balance.z_coef", "balance.sinkhorn_iterations"),
    *("optim.weight_decay", "optim.schedule.warmup_steps", "train.grad_clip", "train.eval_every", "train.checkpoint_every"),
    *("train.batch_ramp.steps", "seed"),
)
"""Must be 0 or above."""


def _sizes(config: Config) -> None:
    rules: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
        (POSITIVE, "must be above 0", lambda v: v > 0),
        (OPTIONAL_POSITIVE, "must be above 0, or null", lambda v: v > 0),
        (NOT_NEGATIVE, "must be 0 or above", lambda v: v >= 0),
    )
    for keys, demand, holds in rules:
        for key in keys:
            value = _value(config, key)
            if value is not None and not (math.isfinite(value) and holds(value)):
                raise ConfigError(f"{key}={value} {demand if math.isfinite(value) else 'must be a finite number'}.")


def _value(config: Config, key: str) -> float | None:
    node: object = config
    for part in key.split("."):
        node = getattr(node, part)
    return node  # type: ignore[return-value]


def _ffn(model: ModelConfig) -> None:
    if model.first_dense_layers > model.num_layers:
        raise ConfigError(f"model.first_dense_layers={model.first_dense_layers} is more than model.num_layers={model.num_layers}.")
    if model.ffn_pattern is not None and not model.ffn_pattern:
        raise ConfigError("model.ffn_pattern=[] names no layer; write for example [dense,moe], or null.")
    if "dense" in model.ffn_kinds() and model.ffn_hidden_size < 1:
        raise ConfigError(f"the model has dense layers, but model.ffn_hidden_size={model.ffn_hidden_size}; set it above 0.")


def _attention(a: AttentionConfig) -> None:
    if a.kind == "mla":
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(a, key) < 1:
                raise ConfigError(f"model.attention.{key}={getattr(a, key)} must be above 0 with model.attention.kind=mla.")
        if a.qk_rope_head_dim % 2:
            raise ConfigError(
                f"model.attention.qk_rope_head_dim={a.qk_rope_head_dim} is odd: rotary embedding turns pairs; use {a.qk_rope_head_dim + 1}."
            )
    else:
        _grouped_query(a)
    if a.rope.scaling == "yarn":
        _yarn(a)


def _grouped_query(a: AttentionConfig) -> None:
    if a.head_dim < 1 or a.num_kv_heads < 1:
        raise ConfigError(f"model.attention.head_dim={a.head_dim} and num_kv_heads={a.num_kv_heads} must be above 0.")
    if a.num_heads % a.num_kv_heads:
        divisors = ", ".join(str(d) for d in range(1, a.num_heads + 1) if a.num_heads % d == 0)
        raise ConfigError(
            f"model.attention.num_heads={a.num_heads} is not divisible by model.attention.num_kv_heads={a.num_kv_heads}; "
            f"choose one of {divisors} key/value heads."
        )
    if not 0 < a.rope.fraction <= 1:
        raise ConfigError(f"model.attention.rope.fraction={a.rope.fraction} must lie in (0, 1].")
    rotated = a.head_dim * a.rope.fraction
    if rotated != int(rotated) or int(rotated) % 2 or rotated < 2:
        raise ConfigError(
            f"model.attention.head_dim={a.head_dim} × rope.fraction={a.rope.fraction} = {rotated:g} rotated dimensions; rotary embedding "
            "turns pairs, so choose an even whole number."
        )


def _yarn(a: AttentionConfig) -> None:
    rope = a.rope
    if rope.factor < 1:
        raise ConfigError(f"model.attention.rope.factor={rope.factor} must be at least 1 with scaling=yarn.")
    if rope.original_max_seq_len < 1:
        raise ConfigError(f"model.attention.rope.original_max_seq_len={rope.original_max_seq_len} must be above 0.")
    if not 0 < rope.beta_slow <= rope.beta_fast:
        raise ConfigError(
            f"model.attention.rope.beta_fast={rope.beta_fast} must be at least beta_slow={rope.beta_slow}, both above 0 (YaRN: 32, 1)."
        )
    if (rope.mscale is None) != (rope.mscale_all_dim is None):
        raise ConfigError(
            f"model.attention.rope.mscale={rope.mscale} and mscale_all_dim={rope.mscale_all_dim} are used together; set both or neither."
        )


def _moe(model: ModelConfig) -> None:
    moe, router = model.moe, model.moe.router
    for key, value in (("num_experts", moe.num_experts), ("top_k", moe.top_k), ("expert_hidden_size", moe.expert_hidden_size)):
        if value < 1:
            raise ConfigError(
                f"model.moe.{key}={value} must be above 0: the model has {model.ffn_kinds().count('moe')} MoE layers. "
                f"For a dense model set model.first_dense_layers={model.num_layers}."
            )
    experts, top_k, groups = moe.num_experts, moe.top_k, router.num_groups
    if top_k > experts:
        raise ConfigError(
            f"model.moe.top_k={top_k} is more than model.moe.num_experts={experts}; a token visits at most every expert once."
        )
    if experts % groups:
        raise ConfigError(
            f"model.moe.num_experts={experts} is not divisible by model.moe.router.num_groups={groups}; choose a divisor of {experts}."
        )
    if router.topk_groups > groups:
        raise ConfigError(f"model.moe.router.topk_groups={router.topk_groups} is more than model.moe.router.num_groups={groups}.")
    reachable = router.topk_groups * (experts // groups)
    if top_k > reachable:
        raise ConfigError(
            f"model.moe.top_k={top_k} is more than the {reachable} experts of the topk_groups={router.topk_groups} chosen groups "
            f"({experts} experts in {groups} groups); raise model.moe.router.topk_groups or lower top_k."
        )
    if not 0 <= router.jitter < 1:
        raise ConfigError(f"model.moe.router.jitter={router.jitter} must lie in [0, 1).")


def _balance(config: Config) -> None:
    balance, moe, router = config.balance, config.model.moe, config.model.moe.router
    if balance.bias != "none" and moe.top_k == moe.num_experts > 0:
        raise ConfigError(
            f"balance.bias={balance.bias} has nothing to balance: every token visits all {moe.num_experts} experts. Use balance=none."
        )
    outside = router.score == "sqrt_softplus" or (router.score == "softmax" and router.softmax_order == "after_topk")
    if balance.bias == "quantile" and outside:
        chosen = router.score if router.score != "softmax" else "softmax with softmax_order=after_topk"
        raise ConfigError(
            f"balance.bias=quantile needs router scores in [0, 1], but {chosen} has none; use balance=bias (the sign rule), "
            "or model.moe.router.score=sigmoid."
        )
    if balance.bias == "quantile" and router.num_groups > 1:
        raise ConfigError(
            f"balance.bias=quantile takes its cut over all experts, but model.moe.router.num_groups={router.num_groups} limits the choice "
            "to groups, and the load would not settle; set num_groups=1 and topk_groups=1, or use balance=bias (the sign rule)."
        )
    if balance.sinkhorn_iterations and router.num_groups > 1:
        raise ConfigError(
            f"balance.sinkhorn_iterations={balance.sinkhorn_iterations} selects among all experts, but model.moe.router.num_groups="
            f"{router.num_groups} limits the choice to groups; set num_groups=1, or use another balance."
        )


def _data(config: Config) -> None:
    data, model = config.data, config.model
    if data.seq_len > model.max_seq_len:
        raise ConfigError(
            f"data.seq_len={data.seq_len} is longer than model.max_seq_len={model.max_seq_len}; shorten the sequences or raise the limit."
        )
    if data.seq_len < 2 or data.seq_len <= model.mtp.depth:
        raise ConfigError(f"data.seq_len={data.seq_len} must be at least 2 and above model.mtp.depth={model.mtp.depth}.")
    if data.kind == "python_stdlib" and data.vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's data.vocab_size={data.vocab_size}; "
            f"set model.vocab_size={data.vocab_size} or more."
        )
    if data.weights is not None and len(data.weights) != len(data.paths):
        raise ConfigError(f"data.weights has {len(data.weights)} numbers for {len(data.paths)} data.paths; give one for each path.")


def _train(config: Config) -> None:
    train = config.train
    if train.global_batch % train.micro_batch:
        divisors = [d for d in range(1, train.global_batch + 1) if train.global_batch % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - train.micro_batch))
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not divisible by train.micro_batch={train.micro_batch}; "
            f"set train.micro_batch={nearest}, or a global batch that is a multiple of {train.micro_batch}."
        )
    if train.recompute == "selective" and not train.recompute_parts:
        raise ConfigError(f"train.recompute=selective with no train.recompute_parts; name some of {', '.join(runs.RECOMPUTE_PARTS)}.")
    if not config.run.dir.strip():
        raise ConfigError("run.dir is empty; name the folder that takes everything the run writes.")


def _optim(config: Config) -> None:
    optim, schedule, steps = config.optim, config.optim.schedule, config.train.steps
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={optim.betas} must be two numbers in [0, 1), for example [0.9,0.95].")
    if not 0 <= optim.muon_momentum < 1:
        raise ConfigError(f"optim.muon_momentum={optim.muon_momentum} must lie in [0, 1).")
    if not 0 <= schedule.min_lr_ratio <= 1:
        raise ConfigError(f"optim.schedule.min_lr_ratio={schedule.min_lr_ratio} must lie in [0, 1].")
    if schedule.warmup_steps > steps:
        raise ConfigError(f"optim.schedule.warmup_steps={schedule.warmup_steps} is more than train.steps={steps}; shorten the warm-up.")
    decay = schedule.decay_steps
    if schedule.name == "cosine" and decay is not None and decay <= schedule.warmup_steps:
        raise ConfigError(
            f"optim.schedule.decay_steps={decay} is the step of the minimum and must come after warmup_steps={schedule.warmup_steps}."
        )
    if schedule.name == "wsd" and decay is not None and decay + schedule.warmup_steps > steps:
        raise ConfigError(
            f"optim.schedule: warmup_steps={schedule.warmup_steps} and decay_steps={decay} do not fit into train.steps={steps}."
        )


def _layout(config: Config) -> None:
    """Degrees that no world could hold. The world itself is known where processes start."""
    layout_of(config, None)


def layout_of(config: Config, world_size: int | None) -> Layout:
    """Both meshes for this many processes (None: the least number that the degrees ask for). ConfigError where the degrees do not fit the
    world, the model, its sequences or the global batch; it names the nearest choice that passes all of these."""
    model, train = config.model, config.train
    moe = model.moe if "moe" in model.ffn_kinds() else None
    degrees = {name: getattr(config.parallel, name) for name in DEGREES}
    shape = {
        "num_layers": model.num_layers,
        "num_heads": model.attention.num_heads,
        "num_kv_heads": model.attention.num_kv_heads if model.attention.kind == "gqa" else None,
        "num_experts": moe.num_experts if moe else 0,
        "expert_hidden_size": model.moe.expert_hidden_size,
        "vocab_size": model.vocab_size,
        "ffn_hidden_size": model.ffn_hidden_size if "dense" in model.ffn_kinds() else 0,
        "shared_hidden_size": moe.num_shared_experts * moe.expert_hidden_size if moe else 0,
        "seq_len": config.data.seq_len,
    }

    def shares(layout: Layout) -> int:
        return layout.dense["dp_replicate"] * layout.dense["dp_shard"]

    def deals_the_batch(layout: Layout) -> bool:
        return train.global_batch % (train.micro_batch * shares(layout)) == 0

    def fits(layout: Layout) -> bool:
        return fits_model(layout, **shape)

    def fits_both(layout: Layout) -> bool:
        return fits(layout) and deals_the_batch(layout)

    free, fills = world_size is None, config.parallel.dp_shard == FILL
    try:
        layout = make_layout(smallest_world(**degrees) if world_size is None else world_size, accepts=(fits_both, fits), **degrees)
        check_model(layout, accepts=(deals_the_batch,), world_is_free=free, dp_shard_fills=fills, **shape)
    except LayoutError as error:
        raise ConfigError(str(error)) from None
    unit = train.micro_batch * shares(layout)
    if not deals_the_batch(layout):
        micros = [m for m in range(1, train.micro_batch) if train.global_batch % (m * shares(layout)) == 0]
        advice = f"train.micro_batch={micros[-1]} or " if micros else ""
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not divisible by micro_batch {train.micro_batch} × dp_replicate "
            f"{layout.dense['dp_replicate']} × dp_shard {layout.dense['dp_shard']} = {unit}; set {advice}"
            f"train.global_batch={-(-train.global_batch // unit) * unit}."
        )
    return layout
