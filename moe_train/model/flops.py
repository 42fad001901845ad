"""Floating-point operations of one token, from the shapes: 2 for each multiply-add of every matrix product, attention's included.

The backward pass costs twice the forward pass. Recomputation is not counted (model FLOPs, PaLM arXiv:2204.02311 appendix B).
"""

from __future__ import annotations

from moe_train.config import ModelConfig
from moe_train.model.count import count_parameters


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of the forward pass of one token in a row of seq_len tokens (mean over positions, causal; MTP blocks included)."""
    matrices = count_parameters(config).active_matrices
    # The head multiplies once for the main model and once for each MTP depth, also when it is tied to the embedding.
    matrices += config.vocab_size * config.hidden_size * (1 + config.mtp.depth)
    return 2.0 * matrices + sum(attention_flops(config, layer, seq_len) for layer in range(config.num_layers + config.mtp.depth))


def attention_flops(config: ModelConfig, layer: int, seq_len: int) -> float:
    """Scores and weighted sums of one layer and token: 2 · H · (qk width + value width) · mean number of visible keys."""
    a = config.attention
    if a.kind == "mla":
        qk, value = a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim
    else:
        qk = value = a.head_dim
    keys = (seq_len + 1) / 2
    if a.sliding_window and layer % a.sliding_window_every == 0 and a.sliding_window < seq_len:
        window = a.sliding_window
        keys = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
    return 2.0 * a.num_heads * (qk + value) * keys


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward FLOPs of one token in training."""
    return 3.0 * forward_flops_per_token(config, seq_len)
