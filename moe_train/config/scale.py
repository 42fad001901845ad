"""One dial for the size of `tiny_mla_moe`: model.scale=N multiplies width, depth and the number of experts by N.

Applied once, after composition and before validation. `--cfg job` shows the numbers before scaling, run.dir/config.yaml the scaled ones
together with the N they came from; reading a config.yaml back does not compose, so nothing is scaled twice. The dial multiplies what the
config says, overrides included: model.scale=2 model.num_layers=6 gives 12 layers.

Kept: the width of a head, top-k, shared experts, the number of first dense layers, MTP depth and the vocabulary. Parameters grow about
with N⁴, active ones with N³.
"""

from __future__ import annotations

from dataclasses import replace

from moe_train.config.errors import ConfigError
from moe_train.config.model import ModelConfig

SCALABLE = "tiny_mla_moe"
MAX_SCALE = 32


def scaled(model: ModelConfig) -> ModelConfig:
    """The model with its dial applied; the same object where scale is 1."""
    n = model.scale
    if n == 1:
        return model
    if model.name != SCALABLE:
        raise ConfigError(
            f"model.scale={n} works with model={SCALABLE} alone, not with model.name={model.name}: a published model has its own size. "
            f"Leave model.scale at 1, or use model={SCALABLE}."
        )
    if not 1 <= n <= MAX_SCALE:
        raise ConfigError(f"model.scale={n} must lie in 1 … {MAX_SCALE}.")
    a, moe = model.attention, model.moe
    attention = replace(
        a,
        num_heads=a.num_heads * n,
        q_lora_rank=None if a.q_lora_rank is None else a.q_lora_rank * n,
        kv_lora_rank=a.kv_lora_rank * n,
    )
    if a.kind == "gqa":
        attention.num_kv_heads = a.num_kv_heads * n
    return replace(
        model,
        hidden_size=model.hidden_size * n,
        num_layers=model.num_layers * n,
        ffn_hidden_size=model.ffn_hidden_size * n,
        attention=attention,
        moe=replace(moe, num_experts=moe.num_experts * n, expert_hidden_size=moe.expert_hidden_size * n),
    )
