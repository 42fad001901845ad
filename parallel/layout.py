"""World size and degrees of parallelism -> two meshes over the same ranks, or one clear error. Pure arithmetic: no torch, no process group.

The dense mesh (pp, dp_replicate, dp_shard, cp, tp) shards attention, dense layers, embedding and head. The expert mesh (pp, expert_dp, ep,
etp) shards the routed experts. Both cover the whole world, by two independent divisibility rules: neither multiplies the other's degrees
(Megatron's parallel folding, arXiv:2504.14960). Ranks are numbered row-major in both, outermost axis first: the last axis is contiguous.

Every LayoutError ends in a way out that was tried: the nearest change after which the same check passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "expert_dp", "ep", "etp")
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "ep", "etp", "cp")  # what a user sets; expert_dp is always what is left
FILL = -1
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev")


class LayoutError(ValueError):
    """Degrees that do not fit the world or the model; the message holds the numbers and the way out."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of both meshes, outermost first. The product of each is the world size."""

    world_size: int
    dense: dict[str, int]
    expert: dict[str, int]

    def degrees(self) -> dict[str, int]:
        """The arguments of make_layout that give this layout, none of them -1."""
        sizes = self.dense | self.expert
        return {name: sizes[name] for name in DEGREES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: index} of a rank in both meshes at once; pp, the outermost axis of both, has one index. LayoutError for no such rank."""
        return self._indices(rank, self.dense) | self._indices(rank, self.expert)

    def rank_of(self, **indices: int) -> int:
        """The rank at these indices of one mesh: rank_of(pp=1, ep=3). Axes of size 1 may be left out. LayoutError names what is missing."""
        mesh, rank = self._mesh_of(indices), 0
        for axis, size in mesh.items():
            if axis not in indices and size > 1:
                raise LayoutError(f"one rank needs an index for every axis of its mesh; give {axis}=0 … {size - 1}.")
            index = indices.get(axis, 0)
            if not 0 <= index < size:
                raise LayoutError(f"{axis}={index} does not exist in an axis of size {size}; choose {axis}={0 if index < 0 else size - 1}.")
            rank = rank * size + index
        return rank

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks, `rank` among them, that differ from it in `axes` of one mesh alone; ascending, so every member sees one order."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        mesh = self._mesh_of(names)
        indices = self._indices(rank, mesh)
        return _ranks(mesh, {axis: range(size) if axis in names else (indices[axis],) for axis, size in mesh.items()})

    def groups(self, axes: str | Iterable[str]) -> list[tuple[int, ...]]:
        """Every group of these axes once: together they hold each rank of the world exactly once."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        firsts = {axis: (0,) if axis in names else range(size) for axis, size in self._mesh_of(names).items()}
        return [self.group(rank, names) for rank in _ranks(self._mesh_of(names), firsts)]

    def layers(self, rank: int, num_layers: int, split: Callable[[int, int], list[range]] | None = None) -> range:
        """Layers of the rank's stage; `split(num_layers, num_stages)` says how they are dealt out (None: even_split)."""
        return (split or even_split)(num_layers, self.dense["pp"])[self.coordinates(rank)["pp"]]

    def rows(self, rank: int, global_batch: int) -> range:
        """Rows of the global batch that the rank computes: one contiguous share for each of the dp_replicate × dp_shard indices."""
        at = self.coordinates(rank)
        shares = self.dense["dp_replicate"] * self.dense["dp_shard"]
        return _share(global_batch, shares, at["dp_replicate"] * self.dense["dp_shard"] + at["dp_shard"], "rows")

    def tokens(self, rank: int, seq_len: int) -> list[range]:
        """Positions of each of its rows whose residual stream the rank keeps.

        cp > 1 cuts the sequence into 2·cp slices and gives rank i slices i and 2·cp-1-i (zig-zag: causal attention then costs every rank
        the same); tp cuts what its cp rank holds into equal runs (sequence parallelism).
        """
        at, cp = self.coordinates(rank), self.dense["cp"]
        slices = [at["cp"], 2 * cp - 1 - at["cp"]] if cp > 1 else [0]
        held = [_share(seq_len, 2 * cp if cp > 1 else 1, index, "tokens") for index in slices]
        run = _share(sum(map(len, held)), self.dense["tp"], at["tp"], "tokens")
        kept: list[range] = []
        before = 0
        for part in held:
            piece = part[max(run.start - before, 0) : max(run.stop - before, 0)]
            before += len(part)
            if kept and piece and kept[-1].stop == piece.start:
                kept[-1] = range(kept[-1].start, piece.stop)
            elif piece:
                kept.append(piece)
        return kept

    def heads(self, rank: int, num_heads: int) -> range:
        """Attention heads the rank computes in each of its layers: one contiguous share for each tp index."""
        return _share(num_heads, self.dense["tp"], self.coordinates(rank)["tp"], "heads")

    def experts(self, rank: int, num_experts: int) -> range:
        """Routed experts the rank holds (a 1/etp part of each) in each of its MoE layers: one contiguous share for each ep index."""
        return _share(num_experts, self.expert["ep"], self.coordinates(rank)["ep"], "experts")

    def _mesh_of(self, axes: Iterable[str]) -> dict[str, int]:
        names = list(axes)
        for mesh in (self.dense, self.expert):
            if all(name in mesh for name in names):
                return mesh
        raise LayoutError(
            f"axes {', '.join(names)} lie in no one mesh; choose from {', '.join(DENSE_AXES)}, or from {', '.join(EXPERT_AXES)}."
        )

    def _indices(self, rank: int, mesh: dict[str, int]) -> dict[str, int]:
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} does not exist among {self.world_size} processes; choose 0 … {self.world_size - 1}.")
        indices = {}
        for axis, size in reversed(mesh.items()):
            rank, indices[axis] = divmod(rank, size)
        return {axis: indices[axis] for axis in mesh}


Accepts = Callable[[Layout], bool]  # which layouts advice may name, beyond the rules at hand
Fits = Callable[[int, dict[str, int]], bool]
SEARCHED_WORLDS = 64  # on each side of the world, for advice: `accepts` may exclude the nearest


def even_split(num_items: int, num_parts: int) -> list[range]:
    """Contiguous parts whose sizes differ by at most one, the larger ones first."""
    small, larger = divmod(num_items, num_parts)
    starts = [small * part + min(part, larger) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


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
    accepts: Sequence[Accepts] = (),
) -> Layout:
    """Both meshes. One degree may be -1 and takes what is left: of the dense mesh, or for ep and etp of the expert mesh (expert_dp is 1).

    LayoutError where the degrees do not cover the world; its advice passes the first of `accepts` (a model's rules, say) that it can.
    """
    degrees = dict(zip(DEGREES, (dp_replicate, dp_shard, tp, pp, ep, etp, cp), strict=True))
    if world_size < 1:
        raise LayoutError(f"a world of {world_size} processes cannot train; start at least 1.")
    for name, degree in degrees.items():
        if degree < 1 and degree != FILL:
            raise LayoutError(f"parallel.{name}={degree} must be at least 1 (or -1: what is left); set parallel.{name}=1.")
    open_ones = [name for name, degree in degrees.items() if degree == FILL]
    if len(open_ones) > 1:
        kept = "dp_shard" if "dp_shard" in open_ones else open_ones[0]
        given = " and ".join(f"parallel.{name}=-1" for name in open_ones)
        ones = " ".join(f"parallel.{name}=1" for name in open_ones if name != kept)
        raise LayoutError(f"{given}: only one degree can take what is left; keep parallel.{kept}=-1 and set {ones}.")
    layout = _meshes(world_size, degrees)
    if isinstance(layout, str):
        raise LayoutError(f"{layout}; {_other_meshes(world_size, degrees, accepts)}.")
    return layout


def smallest_world(**degrees: int) -> int:
    """The least number of processes these degrees (as in make_layout) can cover; 1 and more also where they cannot cover any."""
    dense = math.prod(degrees.get(axis, 1) for axis in DENSE_AXES if degrees.get(axis, 1) > 0)
    expert = math.prod(degrees.get(axis, 1) for axis in EXPERT_AXES if degrees.get(axis, 1) > 0)
    fills = any(degrees.get(axis) == FILL for axis in DENSE_AXES if axis != "pp")
    return math.lcm(dense, expert) if fills else dense


def _meshes(world: int, degrees: dict[str, int]) -> Layout | str:
    """The layout, or which rule fails with which numbers."""
    full = dict(degrees)
    dense = [axis for axis in DENSE_AXES if full[axis] != FILL]
    size, terms = _product(full, dense)
    if len(dense) < len(DENSE_AXES):
        if world % size:
            return f"{world} processes are not divisible by {terms} = {size}"
        full |= {axis: world // size for axis in DENSE_AXES if full[axis] == FILL}
    elif size != world:
        return f"{terms} = {size}, but there are {world} processes"
    size, terms = _product(full, [axis for axis in ("pp", "ep", "etp") if full[axis] != FILL])
    if world % size:
        return f"{world} processes are not divisible by {terms} = {size} (the experts' mesh)"
    full |= {axis: world // size for axis in ("ep", "etp") if full[axis] == FILL}
    full["expert_dp"] = world // (full["pp"] * full["ep"] * full["etp"])
    return Layout(world, {axis: full[axis] for axis in DENSE_AXES}, {axis: full[axis] for axis in EXPERT_AXES})


def _other_meshes(world: int, degrees: dict[str, int], accepts: Sequence[Accepts]) -> str:
    """The nearest worlds for these degrees and the nearest degrees for this world, by the strictest of `accepts` that takes some."""
    for good in (*accepts, bool):  # bool: any layout is good

        def fits(world: int, degrees: dict[str, int], good: Accepts = good) -> bool:
            return isinstance(layout := _meshes(world, degrees), Layout) and good(layout)

        ways = [*_other_worlds(world, degrees, fits), *_other_degrees(world, degrees, fits)]
        if ways:
            return " or ".join(ways)
    ones = " ".join(f"parallel.{name}=1" for name, degree in degrees.items() if degree != 1 and name != "dp_shard")
    return f"set {ones} parallel.dp_shard={world}"


def _other_worlds(world: int, degrees: dict[str, int], fits: Fits) -> Iterator[str]:
    whole, _ = _product(degrees, [axis for axis in DENSE_AXES if degrees[axis] != FILL])
    suffix = ""
    if all(degrees[axis] != FILL for axis in DENSE_AXES):
        if fits(whole, degrees):
            yield f"start {whole} process{'es' if whole > 1 else ''}"
            return
        if FILL in degrees.values():
            return
        degrees, suffix = degrees | {"dp_shard": FILL}, " with parallel.dp_shard=-1"
    unit = smallest_world(**degrees)
    below = world - world % unit
    found = [next((n for n in islice(range(below, 0, -unit), SEARCHED_WORLDS) if fits(n, degrees)), None)]
    found.append(next((n for n in range(below + unit, below + unit * SEARCHED_WORLDS, unit) if fits(n, degrees)), None))
    if any(found):
        yield f"start {' or '.join(str(n) for n in found if n)} processes{suffix}"


def _other_degrees(world: int, degrees: dict[str, int], fits: Fits) -> Iterator[str]:
    """One other degree; if none will do, one other degree with dp_shard filling the rest."""
    ways = [(name != "dp_shard", degree == 1, abs(v - degree), v, name) for name, degree in degrees.items() for v in _divisors(world)]
    ways = sorted(way for way in ways if degrees[way[-1]] not in (FILL, way[-2]))
    for *_, value, name in ways:
        if fits(world, degrees | {name: value}):
            yield f"set parallel.{name}={value}"
            return
    for *_, value, name in ways:
        filled = degrees | {name: value, "dp_shard": FILL}
        if name != "dp_shard" and FILL not in degrees.values() and fits(world, filled):
            rest, _ = _product(filled, [axis for axis in DENSE_AXES if axis != "dp_shard"])
            yield f"set parallel.{name}={value} parallel.dp_shard={world // rest}"
            return


def _product(sizes: dict[str, int], axes: Iterable[str]) -> tuple[int, str]:
    names = list(axes)
    return math.prod(sizes[axis] for axis in names), " × ".join(f"{axis} {sizes[axis]}" for axis in names)


def _ranks(mesh: dict[str, int], indices: Mapping[str, Iterable[int]]) -> tuple[int, ...]:
    """Ascending ranks of every combination of indices."""
    strides = [math.prod(list(mesh.values())[i + 1 :]) for i in range(len(mesh))]
    return tuple(sum(map(int.__mul__, strides, at)) for at in product(*indices.values()))


def _share(total: int, parts: int, index: int, what: str) -> range:
    if total % parts:
        raise LayoutError(f"{total} {what} are not divisible by {parts} parts; use {max(round(total / parts), 1) * parts}.")
    return range(total // parts * index, total // parts * (index + 1))


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


@dataclass(frozen=True)
class _Shape:
    """What the rules read of model and batch; 0 means that there is no such thing, or that it is not known."""

    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    num_experts: int
    expert_hidden_size: int
    vocab_size: int = 0
    ffn_hidden_size: int = 0
    shared_hidden_size: int = 0
    seq_len: int = 0


@dataclass(frozen=True)
class _Problem:
    rule: str
    text: str
    keys: tuple[str, ...] = ()
    values: Callable[[], Iterable[int]] = tuple  # of those degrees, to choose from
    others: tuple[str, ...] = ()  # changes outside the degrees, or of several at once


def check_model(
    layout: Layout, *, accepts: Sequence[Accepts] = (), world_is_free: bool = False, dp_shard_fills: bool = False, **shape: int | None
) -> None:
    """LayoutError where the model or its sequences cannot be cut this way, with the nearest degrees that pass every rule (and `accepts`).

    num_layers, num_heads, num_kv_heads (None: latent attention), num_experts (0: a dense model) and expert_hidden_size are required;
    vocab_size, ffn_hidden_size (of dense layers), shared_hidden_size (all shared experts of a layer) and seq_len are checked where given.
    Advice may ask for another world where it is free, and leaves dp_shard out where that is given as -1.
    """
    known = _Shape(**shape)  # type: ignore[arg-type]
    problem = next(_problems(layout, known), None)
    if problem is not None:
        named = () if dp_shard_fills else ("dp_shard",)
        repairs = _repairs(layout, problem, known, world_is_free, accepts, named)
        raise LayoutError(f"{problem.text}; set {' or '.join([*repairs, *problem.others])}.")


def fits_model(layout: Layout, **shape: int | None) -> bool:
    """Whether check_model passes."""
    return next(_problems(layout, _Shape(**shape)), None) is None  # type: ignore[arg-type]


def _problems(layout: Layout, s: _Shape) -> Iterator[_Problem]:
    d = layout.degrees()
    tp, cp, pp, ep, etp = (d[axis] for axis in ("tp", "cp", "pp", "ep", "etp"))
    whole_kv = " (a rank needs whole key/value heads of its own: copies on several ranks would train apart)"
    for rule, number, key, name, reason in (
        ("heads", s.num_heads, "tp", f"{s.num_heads} attention heads are", ""),
        ("kv", s.num_kv_heads or 0, "tp", f"{s.num_kv_heads} key/value heads are", whole_kv),
        ("vocab", s.vocab_size, "tp", f"model.vocab_size={s.vocab_size} is", ""),
        ("ffn", s.ffn_hidden_size, "tp", f"model.ffn_hidden_size={s.ffn_hidden_size} is", ""),
        ("shared", s.shared_hidden_size, "tp", f"the shared experts' width {s.shared_hidden_size} is", ""),
        ("experts", s.num_experts, "ep", f"{s.num_experts} experts are", " (a rank would hold none)" if ep > s.num_experts else ""),
        ("width", s.expert_hidden_size if s.num_experts else 0, "etp", f"an expert's width {s.expert_hidden_size} is", ""),
    ):
        if number % d[key]:
            padded = (f"model.vocab_size={-(-number // tp) * tp}",) if rule == "vocab" else ()
            text = f"{name} not divisible by parallel.{key}={d[key]}{reason}"
            yield _Problem(rule, text, (key,), lambda number=number: _divisors(number), padded)  # type: ignore[misc]
    if pp > s.num_layers:
        yield _Problem("layers", f"parallel.pp={pp} stages for {s.num_layers} layers", ("pp",), lambda: range(1, s.num_layers + 1))
    if s.num_experts == 0 and ep * etp > 1:
        text = f"parallel.ep={ep} and etp={etp} have no effect in a model without experts"
        yield _Problem("dense", text, others=("parallel.ep=1 parallel.etp=1",))
    unit = math.lcm(cp * tp, 2 * cp if cp > 1 else 1)
    if s.seq_len % unit:
        why = f"{unit} (cp {cp} × tp {tp} ranks split its tokens{', and zig-zag order needs 2 × cp slices' if cp > 1 else ''})"
        text, near = f"data.seq_len={s.seq_len} is not divisible by {why}", max(s.seq_len // unit, 1) * unit
        yield _Problem("tokens", text, ("cp", "tp"), lambda: _divisors(s.seq_len), (f"data.seq_len={near}",))


def _repairs(layout: Layout, problem: _Problem, s: _Shape, free: bool, accepts: Sequence[Accepts], named: tuple[str, ...]) -> list[str]:
    """The nearest other value of one degree that breaks no rule (or at least not this one), with the dp_shard that it brings along."""
    before = layout.degrees()
    for good in (*accepts, bool, None):  # bool: any that breaks no rule; None: any that mends this one
        for key in problem.keys:
            for value in sorted({*problem.values()} - {before[key]}, key=lambda v: (abs(v - before[key]), v)):
                repaired = _with_degree(layout, key, value, free)
                broken = {p.rule for p in _problems(repaired, s)} if repaired else {problem.rule}
                if repaired and (not broken and good(repaired) if good else problem.rule not in broken):
                    after = repaired.degrees()
                    return [" ".join(f"parallel.{name}={after[name]}" for name in (key, *named) if after[name] != before[name])]
    return []


def _with_degree(layout: Layout, key: str, value: int, free: bool) -> Layout | None:
    """The layout with another degree, dp_shard following: it fills the world, or (free) grows to the next that the expert mesh divides."""
    degrees = layout.degrees() | {key: value}
    rest = math.prod(degrees[axis] for axis in DENSE_AXES if axis != "dp_shard")
    experts, world = degrees["pp"] * degrees["ep"] * degrees["etp"], layout.world_size
    if free:
        step = experts // math.gcd(rest, experts)
        world = rest * step * -(-degrees["dp_shard"] // step)
    changed = _meshes(world, degrees | {"dp_shard": FILL})
    return changed if isinstance(changed, Layout) else None


def check_schedule(num_stages: int, num_micro_batches: int, schedule: str, *, num_ranks: int | None = None) -> None:
    """LayoutError where a pipeline schedule cannot run so many stages (of all ranks) with so few micro-batches M a step.

    num_ranks is parallel.pp (None: one stage a rank for gpipe and 1f1b, else two). gpipe any M · 1f1b M ≥ stages · interleaved_1f1b
    M ≥ ranks in equal rounds, M divisible by ⌊M / ranks⌋ · zbv any M, two stages a rank · dualpipev M ≥ stages, two stages a rank: the
    demands of torch.distributed.pipelining.
    """
    if schedule not in SCHEDULES:
        raise LayoutError(f"the pipeline schedule {schedule} is not known; choose one of {', '.join(SCHEDULES)}.")
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    ranks = max(num_stages // per_rank, 1) if num_ranks is None else num_ranks
    if min(num_stages, num_micro_batches, ranks) < 1:
        raise LayoutError(f"{num_stages} stages, {num_micro_batches} micro-batches and {ranks} ranks must all be at least 1.")
    loops = schedule == "interleaved_1f1b"
    if loops:
        per_rank = max(round(num_stages / ranks), 2)
    if num_stages != per_rank * ranks:
        raise LayoutError(f"{schedule} cannot deal {num_stages} stages out to {ranks} ranks; use {per_rank * ranks} stages.")
    needed = {"1f1b": num_stages, "dualpipev": num_stages, "interleaved_1f1b": ranks}.get(schedule, 1)
    rounds = max(num_micro_batches // ranks, 1) if loops else 1
    if num_micro_batches < needed or num_micro_batches % rounds:
        legal = (m for m in range(needed, num_micro_batches + needed + 1) if not loops or m % (m // ranks) == 0)
        demand = f"at least {needed}" if num_micro_batches < needed else f"a multiple of its {rounds} rounds of {ranks}"
        raise LayoutError(
            f"{schedule} over {num_stages} stages on {ranks} ranks needs {demand} micro-batches a step, but there are {num_micro_batches}; "
            f"use {min(legal, key=lambda m: abs(m - num_micro_batches))} micro-batches."
        )
