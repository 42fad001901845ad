"""QK-clip (Kimi K2, arXiv:2507.20534 §2.1): heads whose largest attention logit S_max exceeded τ shrink by γ = τ / S_max after the update.

MLA: q^C and k^C rows of the head × √γ, q^R × γ; k^R is shared by all heads and untouched, and so are values: the logit of every head
scales by its own γ. GQA with a key head per query head: q and k × √γ. GQA with shared key heads: q × γ alone, the rule of the shared
k^R: a key head scaled for one of its query heads would change the others'. Biases of the projections scale with them. With QK-norm the
projections' scale does not reach the logits, so QK-clip would do nothing: refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_train.config import ConfigError, ModelConfig
from moe_train.model.attention import GroupedQueryAttention, MultiHeadLatentAttention


def check_qk_clip(config: ModelConfig, tau: float) -> None:
    if config.attention.kind == "gqa" and config.attention.qk_norm != "none":
        raise ConfigError(
            f"optim.name=muonclip has no effect with model.attention.qk_norm={config.attention.qk_norm}: normalised queries and keys do "
            "not grow with their weights. Use optim.name=muon, or qk_norm=none."
        )
    if not tau > 0:
        raise ConfigError(f"optim.qk_clip_tau={tau} must be above 0; to switch QK-clip off use optim.name=muon.")


@torch.no_grad()
def qk_clip(model: nn.Module, master: Mapping[str, Tensor], qk_max: Mapping[int, Tensor], tau: float) -> int:
    """Scale the masters of every head whose qk_max [H] of the step is above tau. Returns the number of heads clipped."""
    clipped = 0
    for prefix, module in model.named_modules():
        if not isinstance(module, MultiHeadLatentAttention | GroupedQueryAttention) or module.layer not in qk_max:
            continue
        qk_max_H = qk_max[module.layer].float()
        gamma_H = torch.where(qk_max_H > tau, tau / qk_max_H, 1.0)
        num = int((gamma_H < 1).sum())
        if num:
            clipped += num
            scale = _scale_mla if isinstance(module, MultiHeadLatentAttention) else _scale_gqa
            scale(module, prefix, master, gamma_H)
    return clipped


def _scale_mla(module: nn.Module, prefix: str, master: Mapping[str, Tensor], gamma_H: Tensor) -> None:
    assert isinstance(module, MultiHeadLatentAttention)
    a = module.config
    query = master[f"{prefix}.{'q_up_proj' if a.q_lora_rank else 'q_proj'}.weight"].unflatten(0, (a.num_heads, -1))
    query[:, : a.qk_nope_head_dim].mul_(gamma_H.sqrt()[:, None, None])
    query[:, a.qk_nope_head_dim :].mul_(gamma_H[:, None, None])
    key = master[f"{prefix}.kv_up_proj.weight"].unflatten(0, (a.num_heads, -1))
    key[:, : a.qk_nope_head_dim].mul_(gamma_H.sqrt()[:, None, None])


def _scale_gqa(module: nn.Module, prefix: str, master: Mapping[str, Tensor], gamma_H: Tensor) -> None:
    assert isinstance(module, GroupedQueryAttention)
    a = module.config
    own_keys = a.num_heads == a.num_kv_heads
    for projection in ("q_proj", "k_proj") if own_keys else ("q_proj",):
        for kind in ("weight", "bias"):
            tensor = master.get(f"{prefix}.{projection}.{kind}")
            if tensor is not None:
                heads = tensor.unflatten(0, (a.num_heads, a.head_dim))
                heads.mul_((gamma_H.sqrt() if own_keys else gamma_H).view(-1, *[1] * (heads.ndim - 1)))
