"""A measurement as a file: JSON with every number, Markdown with medians and spread."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.attention import AttentionResult
from bench.compare import Pair, Table
from bench.environment import ROOT, VENV
from bench.experts import ExpertResult
from bench.shapes import SHAPES

RECORDS = ROOT / "bench" / "records"
PACKAGES = ("torch", "transformers", "torchtitan", "megatron-core", "deepspeed")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    families = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in fields.get("flags", "").split()]
    return {
        "processor": f"{fields.get('model name', platform.processor())} (family {fields.get('cpu family')}, model {fields.get('model')})",
        "instructions": families,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "matmul_gflops": {name: round(_matmul_gflops(dtype)) for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))},
        "peers": _peer_versions(),
    }


def _matmul_gflops(dtype: torch.dtype) -> float:
    """The best of ten products of 2048 × 512 by 512 × 2048 through PyTorch's own matmul."""
    a, b = torch.randn(2048, 512, dtype=dtype), torch.randn(512, 2048, dtype=dtype)
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2 * 2048 * 512 * 2048 / min(times[2:]) / 1e9


def _peer_versions() -> dict[str, str]:
    site = next((VENV / "lib").glob("python*/site-packages"), None) if VENV.exists() else None
    if site is None:
        return {}
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions(path=[str(site)])}
    return {name: found[name] for name in PACKAGES if name in found}


def commit() -> str:
    """The commit, marked when files differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    dirty = subprocess.run(["git", "status", "--porcelain", "moe_train", "bench"], cwd=ROOT, capture_output=True, text=True)
    return "unknown" if head.returncode else head.stdout.strip() + (" with changes" if dirty.stdout.strip() else "")


def write(
    tables: Sequence[Table],
    experts: Sequence[ExpertResult],
    attentions: Sequence[AttentionResult],
    sparse: Sequence[tuple[str, Pair]],
    quick: bool,
) -> Path:
    """Both files; returns the path of the Markdown one."""
    facts = {
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "shapes": {name: asdict(shape) for name, shape in SHAPES.items()},
    }
    raw = {
        **facts,
        "models": [asdict(table) for table in tables],
        "experts": [asdict(result) for result in experts],
        "attention": [asdict(result) for result in attentions],
        "a96_over_dense": [{"precision": precision, **asdict(pair)} for precision, pair in sparse],
    }
    stem = RECORDS / f"{facts['date']}-cpu-speed{'-quick' if quick else ''}"
    RECORDS.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(_page(facts, tables, experts, attentions, sparse)) + "\n")
    return stem.with_suffix(".md")


def _page(
    facts: dict[str, Any],
    tables: Sequence[Table],
    experts: Sequence[ExpertResult],
    attentions: Sequence[AttentionResult],
    sparse: Sequence[tuple[str, Pair]],
) -> list[str]:
    here = facts["machine"]
    lines = [
        "# Speed on a CPU, side by side",
        "",
        f"`{facts['command']}` on {facts['date']}, commit {facts['commit']}.",
        f"{here['processor']}, {here['cores']} cores, {here['memory_gib']} GiB, {', '.join(here['instructions'])};",
        f"one PyTorch matmul: {here['matmul_gflops']['bf16']} GFLOP/s in bf16, {here['matmul_gflops']['fp32']} in fp32.",
        f"Python {here['python']}, torch {here['torch']}; {', '.join(f'{k} {v}' for k, v in here['peers'].items())}.",
        "",
        "Training steps (forward, backward, fused AdamW), sequences of 512, micro-batch 4, random tokens, no balancing loss. Ours and a",
        "peer run in turn; a ratio is our tokens/s over theirs in one round: median (smallest … largest). The JSON file has it all.",
    ]
    for table in tables:
        lines += ["", *_models(table)]
    if sparse:
        lines += ["", "## 96 experts against the dense model of equal active size, both ours", ""]
        lines += ["precision | time per token, MoE / dense", "---|---"]
        lines += [f"{precision} | {_spread([1 / r for r in pair.ratios])}" for precision, pair in sparse]
    if experts:
        lines += ["", "## Expert FFN against a dense FFN of equal FLOPs", ""]
        lines += ["4,096 tokens × top-4, hidden 512, width 256, forward and backward; dispatch and combine included.", ""]
        lines += ["experts | skew | precision | back end | share of the dense FFN's speed | dense, ms", "---|---|---|---|---|---"]
        for r in experts:
            share = f"{r.share:.0%} ({min(r.shares):.0%} … {max(r.shares):.0%})"
            lines.append(f"{r.experts} | {r.skew} : 1 | {r.precision} | {r.backend} | {share} | {r.dense_ms:.1f}")
    if attentions:
        lines += ["", "## Attention in blocks against PyTorch's fused attention", ""]
        lines += ["8/2 heads × 64, 4 rows of 512 tokens, forward and backward; packed: documents of 128 tokens.", ""]
        lines += ["precision | rows | fused / blocks, time | blocks, ms", "---|---|---|---"]
        for result in attentions:
            rows = "packed" if result.packed else "one document"
            lines.append(f"{result.precision} | {rows} | {_spread(result.ratios)} | {result.blocks_ms:.1f}")
    return lines


def _models(table: Table) -> list[str]:
    lines = [
        f"## {table.shape}, {table.precision}",
        "",
        f"moe_train: {table.tokens_per_s:,.0f} tokens/s, {table.facts['parameters'] / 1e6:.1f} M parameters, "
        f"peak memory {_gib(table.peak_ours)}.",
        "",
        "peer | tokens/s | ours / peer | peak memory | dropless",
        "---|---|---|---|---",
    ]
    tokens = SHAPES[table.shape].tokens
    for pair in table.pairs:
        if pair.failure:
            lines.append(f"{pair.theirs} | – | did not run: {pair.failure} | – | {'yes' if pair.dropless else 'no'}")
            continue
        median = sorted(pair.seconds_theirs)[len(pair.seconds_theirs) // 2]
        dropless = "yes" if pair.dropless else "no"
        lines.append(f"{pair.theirs} | {tokens / median:,.0f} | {_spread(pair.ratios)} | {_gib(pair.peak_theirs)} | {dropless}")
    best = table.best_dropless
    if best is None:
        return lines
    compiled = f", compiled {best.ratio * table.compiled_gain:.2f} ×" if table.compiled_gain > 1 else ""
    return [*lines, "", f"Best dropless peer: {best.theirs}; ours is {best.ratio:.2f} × as fast{compiled}."]


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return f"{middle:.2f} ({ordered[0]:.2f} … {ordered[-1]:.2f})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
