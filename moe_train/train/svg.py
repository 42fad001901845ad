"""Line charts and heatmaps as inline SVG: text in, text out, no script and no network. Colours are CSS variables, so that a
page can be light or dark; `PALETTE` gives those of the lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 40
MOST_POINTS = 600
PALETTE = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
PALETTE_DARK = ("#60a5fa", "#f87171", "#34d399", "#fbbf24", "#a78bfa", "#22d3ee", "#f472b6", "#a3e635")
Series = tuple[str, Sequence[float], Sequence[float]]
"""name, x, y"""


def line_chart(series: Sequence[Series], x_label: str, y_label: str, points: bool = False) -> str:
    """One line for each series (at most 8 colours), with axes, units and a legend. Values that are not finite are left out."""
    cleaned = [(name, *_finite(x, y)) for name, x, y in series]
    cleaned = [(name, x, y) for name, x, y in cleaned if x]
    if not cleaned:
        return '<p class="none">nothing was recorded</p>'
    return plot(cleaned, x_label, y_label, points) + _legend([name for name, _, _ in cleaned])


def plot(series: Sequence[Series], x_label: str, y_label: str, points: bool = False) -> str:
    """The `<svg>` of a line chart without its legend; every series has at least one point and every value is finite."""
    x_low, x_high = _range([v for _, x, _ in series for v in x])
    y_low, y_high = _range([v for _, _, y in series for v in y])
    parts = [_axes(x_low, x_high, y_low, y_high, x_label, y_label)]
    for index, (name, x, y) in enumerate(series):
        step = max(1, len(x) // MOST_POINTS)
        chosen = sorted({*range(0, len(x), step), len(x) - 1})
        places = [(_place(x[i], x_low, x_high, LEFT, WIDTH - RIGHT), _place(y[i], y_low, y_high, HEIGHT - BOTTOM, TOP)) for i in chosen]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        parts.append(f'<polyline class="line c{index % 8}" points="{path}"><title>{escape(name)}</title></polyline>')
        if points or len(places) < 30:
            parts += [f'<circle class="dot c{index % 8}" cx="{px:.1f}" cy="{py:.1f}" r="2.5"/>' for px, py in places]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">{"".join(parts)}</svg>'


def heatmap(rows: Sequence[Sequence[float]], x: Sequence[float], x_label: str, y_label: str, limit: float = 2.0) -> str:
    """rows[j][i]: value of expert j at x[i], 1 is the mean. Blue is below, red is above; colours end at 0 and `limit`."""
    if not rows or not x:
        return '<p class="none">nothing was recorded</p>'
    across, down = (WIDTH - LEFT - RIGHT) / len(x), (HEIGHT - TOP - BOTTOM) / len(rows)
    cells = []
    for j, row in enumerate(rows):
        for i, value in enumerate(row):
            colour = _diverging(value, limit)
            cells.append(
                f'<rect x="{LEFT + i * across:.2f}" y="{TOP + j * down:.2f}" width="{across + 0.3:.2f}" '
                f'height="{down + 0.3:.2f}" fill="{colour}">'
                f"<title>step {x[i]:g}, expert {j}: {value:.2f} × mean</title></rect>"
            )
    low, high = float(x[0]), float(x[-1])
    axis = _axes(low, high if high > low else low + 1, 0, 1, x_label, y_label, y_ticks=[(0, str(len(rows) - 1)), (1, "0")])
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">{"".join(cells)}{axis}</svg>'


def _diverging(value: float, limit: float) -> str:
    """Blue (0) over near white (1) to red (limit)."""
    if value <= 1:
        t = max(0.0, value)
        low, high = (33, 102, 172), (245, 245, 245)
    else:
        t = min(1.0, (value - 1) / (limit - 1))
        low, high = (245, 245, 245), (178, 24, 43)
    return "#" + "".join(f"{round(a + (b - a) * t):02x}" for a, b in zip(low, high, strict=True))


def _finite(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return (low, high) if high > low else (low - pad, high + pad)


def _place(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (value - low) / (high - low) * (end - start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside [low, high]."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Short: 1.2M, 30k, 0.05."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def _axes(
    x_low: float, x_high: float, y_low: float, y_high: float, x_label: str, y_label: str, y_ticks: list[tuple[float, str]] | None = None
) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value, text in y_ticks if y_ticks is not None else [(v, number(v)) for v in ticks(y_low, y_high)]:
        y = _place(value, y_low, y_high, bottom, TOP)
        if y_ticks is None:
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    for value in ticks(x_low, x_high):
        x = _place(value, x_low, x_high, LEFT, right)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="label" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(f'<span><i class="key c{i % 8}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{items}</div>'
