"""The models that every participant builds, as plain numbers. Imports nothing, so that every environment can read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """q_lora_rank None: grouped-query attention with per-head query and key norms; else multi-head latent attention."""

    name: str
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    expert_ffn: int = 256
    shared_experts: int = 0
    first_dense: int = 0
    dense_ffn: int = 0
    """Width of a dense layer: as many active parameters as a MoE layer has."""
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    vocab: int = 8192
    sequence: int = 512
    micro_batch: int = 4

    @property
    def tokens(self) -> int:
        return self.sequence * self.micro_batch


A = Shape("A")
B = Shape(
    "B",
    kv_heads=8,
    shared_experts=1,
    first_dense=1,
    dense_ffn=1280,
    q_lora_rank=192,
    kv_lora_rank=128,
    nope_dim=64,
    rope_dim=32,
    value_dim=64,
)
A96 = Shape("A96", experts=96)
DENSE = Shape("dense", experts=0, top_k=0, first_dense=8, dense_ffn=1024)
TINY = Shape(
    "tiny", hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_ffn=16, vocab=64, sequence=16, micro_batch=2
)
SHAPES = {shape.name: shape for shape in (A, B, A96, DENSE, TINY)}
"""A: Qwen3-MoE-like; B: DeepSeek-V3-like; A96: A with 96 experts; dense: the dense model of A's active size (4 experts of 256 = one of
1,024)."""
