"""How expert load is balanced. Each number is one method of `moe_train/model/balancing`; 0 or 'none' switches it off."""

from __future__ import annotations

from dataclasses import dataclass

BIAS_RULES = ("none", "sign", "quantile")
GLOBAL_COUNTS = ("exact", "buffer")


@dataclass
class BalanceConfig:
    name: str = "none"
    aux_coef: float = 0.0
    """Micro-batch auxiliary loss (GShard arXiv:2006.16668, Switch arXiv:2101.03961)."""
    seq_aux_coef: float = 0.0
    """Sequence-wise auxiliary loss (DeepSeek-V3 arXiv:2412.19437 eq. 17-20)."""
    global_aux_coef: float = 0.0
    """Global-batch auxiliary loss (Qwen, arXiv:2501.11873)."""
    global_counts: str = "exact"
    """exact: a forward pass without gradient counts the load of all micro-batches first (no cost with one micro-batch), so that the
    gradient does not depend on the micro-batch size; buffer: counts of the micro-batches so far (the paper's form, cheaper, not
    invariant)."""
    z_coef: float = 0.0
    """Router z-loss (ST-MoE arXiv:2202.08906 eq. 5)."""
    bias: str = "none"
    """sign: DeepSeek's update without auxiliary loss (arXiv:2408.15664); quantile: Kimi K3's quantile balancing (arXiv:2607.24653)."""
    bias_rate: float = 1e-3
    quantile_bins: int = 1000
    sinkhorn_iterations: int = 0
    """> 0: experts are selected on Sinkhorn-normalised scores of the micro-batch in training (S-BASE arXiv:2202.01169; Megatron-LM)."""
    alarm_max_vio: float = 4.0
    """Warn when a layer's MaxVio stays above this."""
