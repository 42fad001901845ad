"""Which logical matrices a parameter holds. Muon orthogonalises each apart, as if the parts had been separate weights:

experts [E, 2F, D] -> E gate and E up matrices of [F, D]; dense gate_up [2F, D] -> gate, up; q/k/v projections -> one matrix a head (Kimi
K3's Per-Head Muon); with `per_head` off they are one matrix, or as many as the projection fuses. All other matrices are one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from moe_train.model.attention import GroupedQueryAttention, MultiHeadLatentAttention


@dataclass(frozen=True)
class Split:
    """View of a parameter as [S, R, C] matrices: `count` equal blocks of rows, each cut into `sizes` rows (in order)."""

    count: int
    sizes: tuple[int, ...]

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Views [S, size, C], one for each size."""
        blocks = tensor.reshape(self.count, -1, tensor.shape[-1])
        return list(blocks.split(self.sizes, dim=1))


def head_split(module: nn.Module, name: str) -> Split | None:
    """How the rows of a query, key or value projection belong to heads; None for any other weight of the module."""
    if isinstance(module, MultiHeadLatentAttention):
        a = module.config
        if name in ("q_up_proj.weight", "q_proj.weight"):
            return Split(a.num_heads, (a.qk_nope_head_dim + a.qk_rope_head_dim,))
        if name == "kv_up_proj.weight":
            return Split(a.num_heads, (a.qk_nope_head_dim, a.v_head_dim))
    if isinstance(module, GroupedQueryAttention):
        heads = {
            "q_proj.weight": module.config.num_heads,
            "k_proj.weight": module.config.num_kv_heads,
            "v_proj.weight": module.config.num_kv_heads,
        }
        if name in heads:
            return Split(heads[name], (module.config.head_dim,))
    return None


def split_of(tensor: Tensor, name: str, module: nn.Module | None, inner: str, per_head: bool) -> Split:
    """The logical matrices of parameter `name`; module is the attention module that holds it as `inner`, if any."""
    rows = tensor.shape[-2]
    if per_head and module is not None:
        heads = head_split(module, inner)
        if heads is not None:
            return heads
    count = tensor.shape[0] if tensor.ndim == 3 else 1
    if "gate_up_proj" in name:
        return Split(count, (rows // 2, rows // 2))
    return Split(count, (rows,))
