"""Typed description of a model: plain numbers, no torch, so that errors and `--help` are instant.

Everything the model code reads is here or in `balance.py`. Names follow the papers; letters in brackets are the shape suffixes used in
`moe_train/model` (D hidden, H heads, E experts, K experts per token, F expert hidden width, V vocabulary, L layers).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

ATTENTIONS = ("mla", "gqa")
QK_NORMS = ("none", "per_head", "full_width")
ROPE_SCALINGS = ("none", "yarn")
FFNS = ("dense", "moe")
ACTIVATIONS = ("swiglu", "swiglu_clamped")
ROUTER_SCORES = ("softmax", "sigmoid", "sqrt_softplus")
SOFTMAX_ORDERS = ("before_topk", "after_topk")
GROUP_SCORES = ("top2_sum", "max")
DROP_POLICIES = ("score", "position")
EXPERT_BACKENDS = ("auto", "grouped", "batched", "loop")
INITS = ("normal", "truncated_normal", "depth_scaled")


@dataclass
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and YaRN (arXiv:2309.00071)."""

    theta: float = 10_000.0
    interleaved: bool = False
    """Pairs (0,1),(2,3)… instead of halves (0,d/2),(1,d/2+1)…. DeepSeek's released weights use interleaved pairs."""
    fraction: float = 1.0
    """Part of each head that is rotated (GLM-4.5: 0.5). GQA only; MLA rotates its decoupled `qk_rope_head_dim`."""
    scaling: str = "none"
    factor: float = 1.0
    original_max_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: Optional[float] = None
    """With `mscale_all_dim`: cos/sin × m(mscale)/m(mscale_all_dim), softmax scale × m(mscale_all_dim)², m(s) = 0.1·s·ln(factor) + 1.
    Both empty: cos/sin × (0.1·ln(factor) + 1) (the YaRN paper; gpt-oss)."""
    mscale_all_dim: Optional[float] = None
    truncate: bool = True
    """Round YaRN's correction range to whole dimensions (gpt-oss: no)."""


@dataclass
class AttentionConfig:
    kind: str = "gqa"
    num_heads: int = 8
    num_kv_heads: int = 8
    """GQA only."""
    head_dim: int = 64
    """GQA only."""
    qk_norm: str = "none"
    """GQA only. per_head: one weight of head_dim (Qwen3); full_width: over all heads at once (OLMoE)."""
    qkv_bias: bool = False
    out_bias: bool = False
    sliding_window: Optional[int] = None
    """GQA only: a token sees itself and the `sliding_window - 1` tokens before it …"""
    sliding_window_every: int = 1
    """… on layers 0, n, 2n, … (gpt-oss: 2, that is every other layer from the first)."""
    sinks: bool = False
    """GQA only: one learned logit a head that takes part in the softmax and carries no value (gpt-oss)."""
    q_lora_rank: Optional[int] = None
    """MLA only: None leaves the query uncompressed (DeepSeek-V2-Lite, Moonlight)."""
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope: RopeConfig = field(default_factory=RopeConfig)


@dataclass
class RouterConfig:
    score: str = "softmax"
    softmax_order: str = "before_topk"
    """softmax only: before_topk scores all experts (Qwen3, DeepSeek-V2); after_topk only the chosen (Mixtral, gpt-oss)."""
    normalize_topk: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2_sum"
    """top2_sum: sum of the two best biased scores in the group (DeepSeek-V3); max: the best one (DeepSeek-V2)."""
    linear_bias: bool = False
    """A trained bias on the router logits (gpt-oss)."""
    selection_bias: bool = False
    """The checkpoint carries DeepSeek's selection bias (`e_score_correction_bias`): a buffer, never a parameter, on selection only. The
    buffer always exists; this only says whether the published model has it."""
    jitter: float = 0.0
    """Multiply the router input by uniform noise in [1 - jitter, 1 + jitter] in training (Switch Transformer)."""
    force_balanced: bool = False
    """Benchmarks only: ignore the scores for selection and deal tokens out round robin."""


@dataclass
class MoEConfig:
    num_experts: int = 0
    top_k: int = 0
    expert_hidden_size: int = 0
    num_shared_experts: int = 0
    """Shared experts are one dense FFN of width num_shared_experts × expert_hidden_size."""
    expert_bias: bool = False
    """Biases on the expert projections (gpt-oss)."""
    capacity_factor: Optional[float] = None
    """None is dropless. Else each expert takes at most ceil(capacity_factor · N · K / E) of a micro-batch's N tokens."""
    drop_policy: str = "score"
    pad_to_capacity: bool = False
    backend: str = "auto"
    router: RouterConfig = field(default_factory=RouterConfig)


@dataclass
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 §2.2)."""

    depth: int = 0
    loss_weight: float = 0.3


@dataclass
class InitConfig:
    scheme: str = "normal"
    """normal: N(0, std); truncated_normal: cut at `cutoff` std (OLMoE: 3); depth_scaled: normal, and output projections by std/√(2L)
    (Megatron, GPT-2)."""
    std: float = 0.02
    cutoff: float = 3.0


@dataclass
class ModelConfig:
    name: str = "custom"
    vocab_size: int = 8192
    hidden_size: int = 256
    num_layers: int = 4
    ffn_hidden_size: int = 0
    """Width of the dense FFN layers (0 where no layer is dense)."""
    first_dense_layers: int = 0
    ffn_pattern: Optional[list[str]] = None
    """dense/moe for each layer, repeated to `num_layers`; overrides first_dense_layers (e.g. [dense, moe])."""
    activation: str = "swiglu"
    swiglu_limit: float = 7.0
    """swiglu_clamped only: gate ≤ limit, |up| ≤ limit, (up + 1) · gate · sigmoid(swiglu_alpha · gate) (gpt-oss)."""
    swiglu_alpha: float = 1.702
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    max_seq_len: int = 4096
    scale: int = 1
    """One dial for `tiny_mla_moe`: width, depth and experts grow together (see `scale.py`)."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    init: InitConfig = field(default_factory=InitConfig)

    def ffn_kinds(self) -> list[str]:
        """'dense' or 'moe' for each of the L layers."""
        if self.ffn_pattern:
            return [self.ffn_pattern[i % len(self.ffn_pattern)] for i in range(self.num_layers)]
        return ["dense" if i < self.first_dense_layers else "moe" for i in range(self.num_layers)]
