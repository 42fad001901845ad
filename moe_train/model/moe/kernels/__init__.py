"""The expert FFN computed in several ways, all with the same result: per-expert loop, grouped matmul, padded batched matmul."""

from moe_train.model.moe.kernels.batched import batched_ffn
from moe_train.model.moe.kernels.grouped import grouped_ffn
from moe_train.model.moe.kernels.loop import loop_ffn
from moe_train.model.moe.kernels.weights import ExpertWeights

__all__ = ["ExpertWeights", "batched_ffn", "grouped_ffn", "loop_ffn"]
