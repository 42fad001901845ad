"""World size and degrees of parallelism -> two meshes over the same ranks, or one clear error. Pure arithmetic: no torch, no process group.

The dense mesh (pp, dp_replicate, dp_shard, cp, tp) shards attention, dense layers, embedding and head. The expert mesh (pp, expert_dp, ep,
etp) shards the routed experts. Both cover the whole world, by two independent divisibility rules: neither multiplies the other's degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "expert_dp", "ep", "etp")


class LayoutError(ValueError):
    """Degrees that do not fit the world or the model; the message holds the numbers and the way out."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of both meshes, outermost first. The product of each is the world size."""

    world_size: int
    dense: dict[str, int]
    expert: dict[str, int]


def make_layout(
    world_size: int,
    *,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
) -> Layout:
    """Both meshes. dp_shard=-1 takes what is left of the world."""
    degrees = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "pp": pp, "ep": ep, "etp": etp, "cp": cp}
    if world_size < 1:
        raise LayoutError(f"a world of {world_size} processes cannot train; start at least 1.")
    for name, degree in degrees.items():
        if degree < 1 and not (name == "dp_shard" and degree == -1):
            raise LayoutError(f"parallel.{name}={degree} must be at least 1{' (or -1: what is left)' if name == 'dp_shard' else ''}.")
    fixed = pp * dp_replicate * cp * tp
    if dp_shard == -1:
        if world_size % fixed:
            raise LayoutError(
                f"{world_size} processes are not divisible by pp {pp} × dp_replicate {dp_replicate} × cp {cp} × tp {tp} = {fixed}; "
                f"start a multiple of {fixed} processes or lower one of these degrees."
            )
        dp_shard = world_size // fixed
    if fixed * dp_shard != world_size:
        raise LayoutError(
            f"pp {pp} × dp_replicate {dp_replicate} × dp_shard {dp_shard} × cp {cp} × tp {tp} = {fixed * dp_shard}, but there are "
            f"{world_size} processes; start {fixed * dp_shard} processes or set parallel.dp_shard=-1 to fill the world."
        )
    experts = pp * ep * etp
    if world_size % experts:
        raise LayoutError(
            f"{world_size} processes are not divisible by pp {pp} × ep {ep} × etp {etp} = {experts} (the experts' mesh); "
            "lower parallel.ep or parallel.etp, or start more processes."
        )
    dense = dict(zip(DENSE_AXES, (pp, dp_replicate, dp_shard, cp, tp), strict=True))
    return Layout(world_size, dense, {"pp": pp, "expert_dp": world_size // experts, "ep": ep, "etp": etp})


def check_model(
    layout: Layout, *, num_layers: int, num_heads: int, num_kv_heads: int | None, num_experts: int, expert_hidden_size: int
) -> None:
    """LayoutError where the model cannot be cut this way. num_kv_heads is None for latent attention, num_experts 0 for a dense model."""
    tp, pp, ep, etp = layout.dense["tp"], layout.dense["pp"], layout.expert["ep"], layout.expert["etp"]
    if num_heads % tp:
        raise LayoutError(f"{num_heads} attention heads are not divisible by parallel.tp={tp}; choose a divisor of {num_heads}.")
    if num_kv_heads is not None and num_kv_heads % tp:
        raise LayoutError(f"{num_kv_heads} key/value heads are not divisible by parallel.tp={tp}; choose a divisor of {num_kv_heads}.")
    if pp > num_layers:
        raise LayoutError(f"parallel.pp={pp} stages for {num_layers} layers; choose at most {num_layers}.")
    if num_experts == 0 and ep * etp > 1:
        raise LayoutError(f"parallel.ep={ep} and etp={etp} have no effect in a model without experts; set both to 1.")
    if num_experts and num_experts % ep:
        raise LayoutError(f"{num_experts} experts are not divisible by parallel.ep={ep}; choose a divisor of {num_experts}.")
    if num_experts and expert_hidden_size % etp:
        raise LayoutError(f"an expert's width {expert_hidden_size} is not divisible by parallel.etp={etp}; choose a divisor of it.")
