"""`python -m bench.balance_shootout`: one training run for each way of balancing, and bench/records/DATE-cpu-balance.{md,json,svg}.

Every run is `moe-train pretrain +experiment=balance_shootout balance=METHOD`: the same model, data, seed and steps; only the balancing
differs. Overrides after the options go to every run (`train.steps=40` for a quick look).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench import record
from bench.environment import ROOT
from moe_train.train.metrics import LOADS, METRICS, read_records
from moe_train.train.run_dir import CONFIG
from moe_train.train.svg import HEIGHT, PALETTE, WIDTH, plot

METHODS = ("none", "aux", "seq_aux", "global_aux", "bias", "quantile")
TARGET = 0.04
"""MaxVio that the papers of the sign rule and of the quantile rule report (arXiv:2408.15664 table 2; arXiv:2607.24653)."""


@dataclass(frozen=True)
class Outcome:
    """What one method reached.

    The last steps are those with the full global batch, after the ramp. loss: their mean LM loss, nats a token. bits_per_byte: validation
    after the last one. max_vio: MaxVio of each one's global batch in its worst layer. max_vio_summed: MaxVio of the worst layer over all
    their tokens together.
    """

    method: str
    loss: float
    bits_per_byte: float
    max_vio: list[float]
    max_vio_summed: float
    seconds: float
    steps: list[int]
    losses: list[float]
    max_vios: list[float]

    @property
    def reached(self) -> bool:
        """Whether a typical step of the end is as balanced as the papers report."""
        return statistics.median(self.max_vio) <= TARGET


def train(method: str, run_dir: Path, overrides: Sequence[str]) -> Outcome:
    """Run the experiment in a process of its own; its output goes to run_dir/log.txt."""
    run_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "moe_train", "pretrain", "+experiment=balance_shootout", f"balance={method}", f"run.dir={run_dir}"]
    begin = time.perf_counter()
    with open(run_dir / "log.txt", "w", encoding="utf-8") as log:
        code = subprocess.run([*command, *overrides], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"bench: balance={method} ended with code {code}:\n{(run_dir / 'log.txt').read_text()[-2000:]}")
    return read(method, run_dir, time.perf_counter() - begin)


def read(method: str, run_dir: Path, seconds: float) -> Outcome:
    """The outcome of a finished run from the files it wrote."""
    records = read_records(run_dir / METRICS)
    last = [r for r in records if r["global_batch"] == records[-1]["global_batch"]]
    loads = [r["load"] for r in read_records(run_dir / LOADS) if r["step"] >= last[0]["step"]]
    summed = [[sum(counts) for counts in zip(*(load[layer] for load in loads), strict=True)] for layer in loads[0]]
    return Outcome(
        method,
        statistics.mean(r["loss"] for r in last),
        next(r["bits_per_byte"] for r in reversed(records) if r.get("bits_per_byte") is not None),
        [r["max_vio"] for r in last],
        max(max(counts) * len(counts) / sum(counts) - 1 for counts in summed),
        seconds,
        [r["step"] for r in records],
        [r["loss"] for r in records],
        [r["max_vio"] for r in records],
    )


def page(facts: dict[str, Any], outcomes: Sequence[Outcome], picture: str) -> str:
    """The Markdown file."""
    here = facts["machine"]
    lines = [
        "# Ways of balancing, side by side",
        "",
        f"`{facts['command']}` on {facts['date']}, commit {facts['commit']};",
        f"{here['processor']}, {here['cores']} cores, torch {here['torch']}.",
        f"{facts['setting']} The JSON file has the whole config and every step.",
        "",
        f"![Loss and MaxVio over the steps]({picture})",
        "",
        f"MaxVio = fullest expert / mean − 1, of the worst layer, on the global batch; the last {len(outcomes[0].max_vio)} steps: median "
        "(smallest … largest).",
        '"Together" counts all tokens of those steps as one batch. The target, from the papers of the sign and the quantile rule:',
        f"at most {TARGET}.",
        "",
        "balance | training loss, nats a token | validation, bits per byte | MaxVio of a step | together | run, s",
        "---|---|---|---|---|---",
    ]
    for o in outcomes:
        spread = f"{statistics.median(o.max_vio):.3f} ({min(o.max_vio):.3f} … {max(o.max_vio):.3f})"
        lines.append(f"{o.method} | {o.loss:.4f} | {o.bits_per_byte:.4f} | {spread} | {o.max_vio_summed:.3f} | {o.seconds:.0f}")
    return "\n".join(lines) + "\n"


def picture(outcomes: Sequence[Outcome]) -> str:
    """Two charts in one SVG file: loss, and MaxVio on a logarithmic axis."""
    loss = plot([(o.method, o.steps, o.losses) for o in outcomes], "step", "loss, nats a token")
    logs = [(o.method, o.steps, [math.log10(max(v, 1e-3)) for v in o.max_vios]) for o in outcomes]
    vio = plot(logs, "step", "log10 of MaxVio, worst layer")
    style = "".join(f".line.c{i}{{stroke:{colour}}}.dot.c{i}{{fill:{colour}}}" for i, colour in enumerate(PALETTE))
    style += ".line{fill:none;stroke-width:1.3}.grid{stroke:#e2e6ea}.axis{stroke:#67707c}.tick,.label,.name{fill:#4b5563;font-size:11px}"
    keys = "".join(
        f'<rect x="{62 + 90 * i}" y="{HEIGHT + 8}" width="10" height="10" fill="{PALETTE[i]}"/>'
        f'<text class="name" x="{76 + 90 * i}" y="{HEIGHT + 17}">{escape(o.method)}</text>'
        for i, o in enumerate(outcomes)
    )
    placed = "".join(
        chart.replace("<svg ", f'<svg x="{WIDTH * i}" y="0" width="{WIDTH}" height="{HEIGHT}" ', 1) for i, chart in enumerate((loss, vio))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 28}" font-family="sans-serif"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{placed}{keys}</svg>\n'
    )


def write(outcomes: Sequence[Outcome], config: str, command: str, records: Path) -> Path:
    """The three files; returns the Markdown one."""
    facts = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": record.commit(),
        "machine": record.machine(),
        "setting": f"{outcomes[0].steps[-1]} steps a run, one run a method, the same seed and data.",
    }
    stem = records / f"{facts['date']}-cpu-balance"
    records.mkdir(parents=True, exist_ok=True)
    raw = {**facts, "config": config, "outcomes": [asdict(o) for o in outcomes]}
    stem.with_suffix(".json").write_text(json.dumps(raw) + "\n", encoding="utf-8")
    stem.with_suffix(".svg").write_text(picture(outcomes), encoding="utf-8")
    stem.with_suffix(".md").write_text(page(facts, outcomes, stem.with_suffix(".svg").name), encoding="utf-8")
    return stem.with_suffix(".md")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.balance_shootout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help=f"groups of conf/balance ({' '.join(METHODS)})")
    parser.add_argument("--records", type=Path, default=record.RECORDS, help="folder of the three files")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = []
        for method in args.methods:
            outcome = train(method, Path(folder) / method, overrides)
            outcomes.append(outcome)
            print(f"bench: {method}: loss {outcome.loss:.4f}, MaxVio {statistics.median(outcome.max_vio):.3f}", file=sys.stderr, flush=True)
        config = (Path(folder) / args.methods[-1] / CONFIG).read_text(encoding="utf-8")
        path = write(outcomes, config, " ".join(["python -m bench.balance_shootout", *sys.argv[1:]]), args.records)
    print(path.read_text(encoding="utf-8"))
    missed = [o.method for o in outcomes if o.method in ("bias", "quantile") and not o.reached]
    if missed:
        print(f"bench: {' and '.join(missed)} did not reach MaxVio {TARGET}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
