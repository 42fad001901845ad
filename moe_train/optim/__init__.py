"""AdamW, Muon and QK-clip on fp32 masters, by parameter name."""

from moe_train.optim.build import Optimizer, build_optimizer
from moe_train.optim.chunks import global_norm
from moe_train.optim.qk_clip import check_qk_clip, qk_clip

__all__ = ["Optimizer", "build_optimizer", "check_qk_clip", "global_norm", "qk_clip"]
