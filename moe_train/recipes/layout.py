"""`moe-train layout WORLD parallel.tp=2 …`: which rank holds what, from arithmetic alone: no torch, no process is started."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe_train.config import Config, ConfigError
from moe_train.config.compose import compose_untyped, typed
from moe_train.config.validate import layout_of
from parallel.layout import DEGREES, DENSE_AXES, EXPERT_AXES, FILL, Layout, even_split

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.table import Table

LARGEST_WORLD = 100_000
ROWS_WITHOUT_ALL = 64
"""A larger world shows its first and last EDGE ranks only."""
EDGE = 8
AXES = [*DENSE_AXES, *EXPERT_AXES[1:]]
"""Columns of both meshes; they share pp."""

PURPOSE = {
    "pp": "stages of layers; activations and their gradients go to the neighbours",
    "dp_replicate": "copies; gradients of whole shards are summed",
    "dp_shard": "shards of dense weights, gradients and moments; gathered for use",
    "cp": "slices of each sequence; keys and values travel",
    "tp": "slices of heads, FFN widths and vocabulary; tokens are gathered and scattered",
    "expert_dp": "copies or shards of the same experts; their gradients are summed",
    "ep": "different experts; tokens travel to them and back",
    "etp": "slices of each expert's width",
}

Split = Callable[[int, int], list[range]]
"""(num_layers, num_stages) -> the layers of each stage."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    # Strings, also WORLD: argparse would answer a wrong number with its usage instead of one line.
    parser.add_argument("world", nargs="?", metavar="WORLD", help="number of processes")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="parallel.tp=2, parallel.ep=-1 (what is left), model=NAME …")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, always of every rank, instead of tables")
    output.add_argument("--all", action="store_true", help=f"print every rank of more than {ROWS_WITHOUT_ALL}")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or ConfigError."""
    world = _world_size(args.world)
    config, filled = _config(args.overrides, world)
    layout = layout_of(config, world)
    # Standard output is the table or the JSON alone.
    if filled and layout.dense["dp_shard"] > 1:
        size = layout.dense["dp_shard"]
        print(
            f"parallel.dp_shard={size}: it was not given and takes what is left; a run needs parallel.dp_shard={size} or -1",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(facts(config, layout), indent=2))
    else:
        _print(config, layout, everything=args.all)
    return 0


def _world_size(given: str | None) -> int:
    if given is None or not given.isascii() or not given.isdecimal():
        raise ConfigError(
            f"the first argument is the number of processes, not {given!r}; write for example moe-train layout 8 parallel.tp=2."
        )
    world = int(given) if len(given) < 10 else LARGEST_WORLD + 1
    if not 1 <= world <= LARGEST_WORLD:
        raise ConfigError(f"WORLD={given} must lie in 1 … {LARGEST_WORLD}; choose {1 if world < 1 else LARGEST_WORLD}.")
    return world


def _config(overrides: list[str], world: int) -> tuple[Config, bool]:
    """The validated config, and whether dp_shard was set to take what is left: where the user gives it no value and nothing else does so.

    The world of this verb is a question, not a set of started processes, so one that is larger than the other degrees is no mistake.
    """
    composed = compose_untyped(overrides)
    open_ones = [name for name, degree in composed.parallel.items() if degree == FILL]
    named = any(override.lstrip("+").startswith("parallel.dp_shard=") for override in overrides)
    filled = not open_ones and not named and composed.parallel.dp_shard == 1
    if filled:
        composed.parallel.dp_shard = FILL
    try:
        return typed(composed), filled
    except ConfigError as error:
        _explain_in(world, composed)
        raise error from None


def _explain_in(world: int, composed: DictConfig) -> None:
    """ConfigError with advice for this world, where it is the layout that cannot be. Validation knows no world and might name another."""
    degrees = {name: composed.parallel[name] for name in DEGREES}
    single = copy.deepcopy(composed)
    single.parallel.update(dict.fromkeys(DEGREES, 1))
    try:
        config = typed(single)
    except ConfigError:
        return
    config.parallel = replace(config.parallel, **degrees)
    layout_of(config, world)


def facts(config: Config, layout: Layout, split: Split = even_split) -> dict[str, Any]:
    """Sizes of both meshes, the groups of rank 0 and what each rank holds. A span [a, b] is a … b-1."""
    return {
        "world_size": layout.world_size,
        "dense": layout.dense,
        "expert": layout.expert,
        "groups": groups(layout),
        "ranks": [
            {
                "rank": rank,
                **layout.coordinates(rank),
                "layers": _span(part.layers),
                "rows": _span(part.rows),
                "tokens": [_span(tokens) for tokens in part.tokens],
                "heads": _span(part.heads),
                "experts": _span(part.experts) if part.experts is not None else None,
            }
            for rank in range(layout.world_size)
            for part in [Part(config, layout, rank, split)]
        ],
    }


class Part:
    """What one rank holds."""

    def __init__(self, config: Config, layout: Layout, rank: int, split: Split = even_split) -> None:
        model, kinds = config.model, config.model.ffn_kinds()
        self.layers = layout.layers(rank, model.num_layers, split)
        self.rows = layout.rows(rank, config.train.global_batch)
        self.tokens = layout.tokens(rank, config.data.seq_len)
        self.heads = layout.heads(rank, model.attention.num_heads)
        sparse = any(kinds[layer] == "moe" for layer in self.layers)
        self.experts = layout.experts(rank, model.moe.num_experts) if sparse else None
        """None: the stage has no MoE layer."""


def groups(layout: Layout) -> dict[str, dict[str, Any]]:
    """For each axis longer than 1: how many groups there are, of how many ranks, and which ranks are in the one of rank 0."""
    sizes = layout.dense | layout.expert
    return {
        axis: {"groups": layout.world_size // size, "ranks_each": size, "of_rank_0": list(layout.group(0, axis))}
        for axis, size in sizes.items()
        if size > 1
    }


def _span(part: range) -> list[int]:
    return [part.start, part.stop]


def _text(part: range | None) -> str:
    """First and last of a range, as a reader counts."""
    if not part:
        return "-"
    return str(part.start) if len(part) == 1 else f"{part.start}-{part[-1]}"


def _row(config: Config, layout: Layout, axes: list[str], rank: int) -> list[str]:
    at, part = layout.coordinates(rank), Part(config, layout, rank)
    etp = layout.expert["etp"]
    experts = _text(part.experts) + (f" ({at['etp'] + 1}/{etp})" if etp > 1 and part.experts else "")
    mesh = [str(at[axis]) for axis in axes]
    tokens = " ".join(map(_text, part.tokens))
    return [str(rank), *mesh, _text(part.layers), _text(part.rows), tokens, _text(part.heads), experts]


def _ranks_text(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:4]))} … {ranks[-1]}"


def _product_text(sizes: dict[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items())


def _print(config: Config, layout: Layout, *, everything: bool) -> None:
    from rich.console import Console

    console = Console()
    ranks = _rank_table(config, layout, AXES, everything)
    # A pipe (rich takes 80 columns for one) gets every column. In a narrow terminal axes of size 1, whose index is 0, make room first.
    if console.is_terminal and _width(ranks) > console.width:
        sizes = layout.dense | layout.expert
        ranks = _rank_table(config, layout, [axis for axis in AXES if sizes[axis] > 1], everything)
    tables = [ranks, *([_group_table(layout)] if layout.world_size > 1 else [])]
    # Lines that the terminal wraps are better than numbers cut short.
    console.width = max(console.width, _width(ranks), *(map(_width, tables) if not console.is_terminal else ()))
    print(f"{config.model.name} on {layout.world_size} ranks, row-major: the last axis is contiguous")
    print(f"dense mesh   {_product_text(layout.dense)}\nexpert mesh  {_product_text(layout.expert)}")
    for table in tables:
        console.print(table)


def _width(table: Table) -> int:
    """Columns of a terminal that show the table whole."""
    from rich.console import Console

    return Console(width=10_000).measure(table).maximum


def _rank_table(config: Config, layout: Layout, axes: list[str], everything: bool) -> Table:
    columns = ["rank", *axes, "layers", "rows", "tokens", "heads", "experts"]
    table = _table([column.replace("_", "_\n") for column in columns], right=len(columns))
    world = layout.world_size
    edge = 0 if everything or world <= ROWS_WITHOUT_ALL else EDGE
    for rank in (*range(edge), *range(world - edge, world)) if edge else range(world):
        table.add_row(*_row(config, layout, axes, rank))
        if rank == edge - 1:
            table.add_row("…")
    if edge:
        table.caption = f"{world - 2 * edge} ranks between are left out; --all prints them"
    return table


def _group_table(layout: Layout) -> Table:
    table = _table(["axis", "groups", "ranks each", "of rank 0", "what its ranks do"], right=0)
    for axis, group in groups(layout).items():
        table.add_row(axis, str(group["groups"]), str(group["ranks_each"]), _ranks_text(group["of_rank_0"]), PURPOSE[axis])
    return table


def _table(columns: list[str], right: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number < right else "left", overflow="fold")
    return table
