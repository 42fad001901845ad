"""`moe-train inspect model=NAME`: what a model weighs and costs, from the meta device: a trillion parameters take seconds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from moe_train.config import ConfigError, ModelConfig
from moe_train.config.compose import compose
from moe_train.model.attention import cache_scalars_per_token
from moe_train.model.count import PARTS, count_parameters
from moe_train.model.flops import flops_per_token, forward_flops_per_token

BYTES_PER_PARAMETER = {
    "bf16 weights": 2,
    "fp32 weights": 4,
    "fp32 training (weights, gradients, AdamW)": 16,
    "bf16 training with fp32 masters": 16,
}
"""fp32: weight 4 + gradient 4 + two moments 8. bf16: weight 2 + gradient 2 + fp32 master 4 + two fp32 moments 8."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="model=NAME, model.num_layers=8, +experiment=demo …")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--seq-len", type=int, metavar="N", help="sequence length for attention's FLOPs (default: the smaller of 4096 and the limit)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or ConfigError."""
    # The data of the default config do not belong to the model asked for: they follow its limits.
    model = compose(args.overrides).model
    seq_len = min(4096, model.max_seq_len) if args.seq_len is None else args.seq_len
    if not 1 <= seq_len <= model.max_seq_len:
        raise ConfigError(f"--seq-len {seq_len} must lie in 1 … model.max_seq_len={model.max_seq_len}.")
    facts = inspect(model, seq_len)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def inspect(model: ModelConfig, seq_len: int) -> dict[str, Any]:
    """Parameters (total, active, by part), bytes, FLOPs per token and bytes of cache per token."""
    count = count_parameters(model)
    return {
        "model": model.name,
        "scale": model.scale,
        "parameters": {"total": count.total, "active": count.active, "selection_bias_buffers": count.selection_bias},
        "by_part": {part: {"total": count.by_part[part], "active": count.active_by_part[part]} for part in PARTS},
        "bytes": {name: size * count.total for name, size in BYTES_PER_PARAMETER.items()},
        "flops_per_token": {
            "seq_len": seq_len,
            "forward": forward_flops_per_token(model, seq_len),
            "training": flops_per_token(model, seq_len),
        },
        "cache_bytes_per_token": {"bf16": 2 * cache_scalars_per_token(model), "fp32": 4 * cache_scalars_per_token(model)},
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    total, active = facts["parameters"]["total"], facts["parameters"]["active"]
    table = Table(title=f"{facts['model']}: {total:,} parameters, {active:,} active ({total / active:.1f} ×)")
    for column in ("part", "parameters", "share", "active", "share of active"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, numbers in facts["by_part"].items():
        if numbers["total"]:
            share, of_active = numbers["total"] / total, numbers["active"] / active
            table.add_row(part, f"{numbers['total']:,}", f"{share:.1%}", f"{numbers['active']:,}", f"{of_active:.1%}")
    costs = Table(title="costs")
    costs.add_column("what")
    costs.add_column("amount", justify="right")
    for name, size in facts["bytes"].items():
        costs.add_row(name, f"{size / 2**30:,.2f} GiB")
    flops = facts["flops_per_token"]
    costs.add_row(f"forward, a token in {flops['seq_len']:,}", f"{flops['forward'] / 1e9:,.3f} GFLOP")
    costs.add_row(f"training, a token in {flops['seq_len']:,}", f"{flops['training'] / 1e9:,.3f} GFLOP")
    costs.add_row("cache a token, bf16", f"{facts['cache_bytes_per_token']['bf16']:,} bytes")
    if facts["parameters"]["selection_bias_buffers"]:
        costs.add_row("selection-bias buffers", f"{facts['parameters']['selection_bias_buffers']:,} entries")
    console = Console()
    console.print(table)
    console.print(costs)
