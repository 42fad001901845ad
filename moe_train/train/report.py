"""run.dir/report.html: one self-contained page about a run, written when it ends, also when it was interrupted, from what the run has
written."""

from __future__ import annotations

import platform
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_train import __version__
from moe_train.train.callbacks import Callback, Record
from moe_train.train.metrics import LOADS, METRICS, read_records
from moe_train.train.run_dir import CONFIG
from moe_train.train.svg import PALETTE, PALETTE_DARK, heatmap, line_chart

if TYPE_CHECKING:
    from moe_train.train.trainer import Trainer

REPORT = "report.html"
LOSSES = {"loss": "train", "eval_loss": "validation", "mtp_loss": "multi-token prediction"}
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


def _colours(bases: str, palette: tuple[str, ...]) -> str:
    return f":root{{{bases};{';'.join(f'--c{i}:{colour}' for i, colour in enumerate(palette))}}}"


LIGHT = _colours("color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b1f24;--dim:#67707c;--rule:#e2e6ea", PALETTE)
DARK = _colours("--bg:#14171b;--card:#1d2127;--ink:#e6e9ed;--dim:#98a2ae;--rule:#323943", PALETTE_DARK)
LAYOUT = """
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}h1{margin:0;font-size:26px}.sub{color:var(--dim);margin:2px 0 22px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px}
.card h2{margin:0 0 8px;font-size:15px}.card p{margin:0 0 8px;color:var(--dim);font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-bottom:16px}
.tile b{display:block;font-size:21px;font-variant-numeric:tabular-nums}.tile span{color:var(--dim);font-size:13px}
svg{width:100%;height:auto;display:block}.grid svg .grid,.grid line.grid{stroke:var(--rule)}.axis{stroke:var(--dim)}
.tick,.label{fill:var(--dim);font-size:11px}.line{fill:none;stroke-width:1.6;stroke-linejoin:round}.legend{font-size:12px;color:var(--dim)}
.legend span{margin-right:14px}.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.wide{grid-column:1/-1}pre{margin:0;overflow:auto;font-size:12px;max-height:420px}.none{color:var(--dim)}
"""
LINES = "".join(
    f".line.c{i}{{stroke:var(--c{i})}}.dot.c{i}{{fill:var(--c{i})}}.key.c{i}{{background:var(--c{i})}}" for i in range(len(PALETTE))
)
STYLE = f"{LIGHT}@media (prefers-color-scheme:dark){{{DARK}}}{LAYOUT}{LINES}"


class Report(Callback):
    """Writes the page at the end of a run. Last in the list of callbacks, so that every file is complete."""

    started = False

    def on_start(self, trainer: Trainer) -> None:
        self.started = True

    def on_end(self, trainer: Trainer, status: str) -> None:
        if self.started:
            (trainer.run_dir / REPORT).write_text(render(trainer.run_dir, trainer.config.run.name, status), encoding="utf-8")


def render(run_dir: Path, name: str, status: str) -> str:
    """The page as text."""
    records, loads = read_records(run_dir / METRICS), read_records(run_dir / LOADS)
    config = (run_dir / CONFIG).read_text(encoding="utf-8") if (run_dir / CONFIG).exists() else ""
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    versions = f"moe_train {__version__} · torch {torch.__version__} · Python {platform.python_version()} · {platform.machine()}"
    last = f"step {records[-1]['step']:,}" if records else "no step"
    body = tiles(records) + f'<div class="grid">{"".join(charts(records, loads) + load_charts(loads))}'
    body += f'<section class="card wide"><h2>Config</h2><pre>{escape(config)}</pre></section></div>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body><main><h1>{escape(name)}</h1>"
        f'<p class="sub">{escape(status)} at {last} · written {written} · {escape(versions)}</p>{body}</main></body></html>\n'
    )


def tiles(records: list[Record]) -> str:
    """The final numbers."""
    if not records:
        return ""
    last = records[-1]
    evaluated = next((r for r in reversed(records) if r.get("bits_per_byte") is not None), {})
    speeds = sorted(r["tokens_per_s"] for r in records if r.get("tokens_per_s"))
    shown = [
        ("training loss, nats a token", last.get("loss"), ".4f"),
        ("validation loss", evaluated.get("eval_loss"), ".4f"),
        ("validation bits per byte", evaluated.get("bits_per_byte"), ".4f"),
        ("MaxVio, worst layer", last.get("max_vio"), ".3f"),
        ("tokens", last.get("tokens"), ",.0f"),
        ("tokens/s, median", speeds[len(speeds) // 2] if speeds else None, ",.0f"),
        ("of the matmul peak", last.get("utilisation"), ".1%"),
        ("skipped steps", last.get("skipped"), ",.0f"),
    ]
    items = [f'<div class="card tile"><b>{value:{form}}</b><span>{label}</span></div>' for label, value, form in shown if value is not None]
    return f'<div class="tiles">{"".join(items)}</div>'


def charts(records: list[Record], loads: list[Record]) -> list[str]:
    """Curves over the steps."""
    layers = max((len(r.get("max_vio_per_layer") or []) for r in records), default=0)
    names = list(loads[-1]["load"]) if loads else []
    per_layer = [(f"layer {names[i] if i < len(names) else i}", *layer_column(records, i)) for i in range(layers)]
    balancing = [(key, *column(records, key)) for key in BALANCING if column(records, key)[0]]
    cards = [
        card("Loss", "Language-model loss alone; balancing losses are apart.", line_chart(
            [(label, *column(records, key)) for key, label in LOSSES.items()], "step", "nats a token")),
        card("Load balance", "MaxVio = fullest expert / mean − 1; 0 is perfect.", line_chart(per_layer, "step", "MaxVio")),
        card("Learning rate", "", line_chart([("lr", *column(records, "lr"))], "step", "learning rate")),
        card("Gradient norm", "Global norm before the clip.", line_chart([("norm", *column(records, "grad_norm"))], "step", "norm")),
        card("Throughput", "", line_chart([("tokens/s", *column(records, "tokens_per_s"))], "step", "tokens/s")),
    ]  # fmt: skip
    if balancing:
        cards.append(card("Balancing losses", "Before their coefficients; 1 is balanced for the auxiliary ones.",
                          line_chart(balancing, "step", "loss")))  # fmt: skip
    return cards


def load_charts(loads: list[Record]) -> list[str]:
    """One heatmap a MoE layer: the share of each expert over time."""
    layers = list(loads[-1]["load"]) if loads else []
    cards = []
    for layer in layers:
        samples = [(r["step"], r["load"][layer]) for r in loads if layer in r["load"]]
        columns = [[value / max(sum(counts) / len(counts), 1e-9) for value in counts] for _, counts in samples]
        rows = [list(row) for row in zip(*columns, strict=True)]
        note = "Tokens of each expert over the mean: blue below, white at the mean, red above (2 × and more)."
        cards.append(card(f"Expert load, layer {layer}", note, heatmap(rows, [step for step, _ in samples], "step", "expert")))
    return cards


def card(title: str, note: str, inside: str) -> str:
    text = f"<p>{escape(note)}</p>" if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{text}{inside}</section>'


def column(records: list[Record], key: str) -> tuple[list[float], list[float]]:
    chosen = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in chosen], [value for _, value in chosen]


def layer_column(records: list[Record], index: int) -> tuple[list[float], list[float]]:
    chosen = [(r["step"], r["max_vio_per_layer"][index]) for r in records if len(r.get("max_vio_per_layer") or []) > index]
    return [step for step, _ in chosen], [value for _, value in chosen]
