"""Turns numbers into SVG: lines, stacked bars, histograms, share bars and the strip of who worked when. No libraries.

Colours are CSS variables of the page (see `page.py`), so that one drawing serves light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 38
MOST_POINTS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: ys[i] at xs[i]; NaN leaves a gap. `style`: line, faint (behind), dots (separate points), or dashed."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    style: str = "line"


# ------------------------------------------------------------------------------------------------- scales and words


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers that span [low, high], about `count` of them."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Short: 0.25, 1.5k, 3e-05."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size != 0 and size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:.4g}"


def _thin(series: Series) -> Series:
    """At most MOST_POINTS points, each the mean of its neighbours: a long run draws as quickly as a short one."""
    n = len(series.xs)
    if n <= MOST_POINTS:
        return series
    stride = math.ceil(n / MOST_POINTS)
    xs, ys = [], []
    for start in range(0, n, stride):
        good = [y for y in series.ys[start : start + stride] if math.isfinite(y)]
        xs.append(series.xs[min(n - 1, start + stride // 2)])
        ys.append(sum(good) / len(good) if good else math.nan)
    return replace(series, xs=xs, ys=ys)


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to the plot's pixels."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool = False
    """y0, y1 and every y are positive; equal factors take equal height."""

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y0, self.y1
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / ((high - low) or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _axes(frame: Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        if frame.x0 <= tick <= frame.x1:
            label = number(tick)
            parts.append(
                f'<text x="{frame.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'
            )
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="label" x="{middle_x}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
    turn = f"rotate(-90 12 {middle_y})"
    parts.append(
        f'<text class="label" x="12" y="{middle_y}" text-anchor="middle" transform="{turn}">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _svg(body: str, label: str, data: object = None) -> str:
    attribute = (
        f" data-chart='{escape(json.dumps(data, separators=(',', ':')), quote=True)}'" if data is not None else ""
    )
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg class="chart" role="img" aria-label="{escape(label)}" {view}{attribute}>{body}</svg>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="legend">{items}</div>'


def nothing(text: str) -> str:
    return f'<div class="nothing">{escape(text)}</div>'


# ----------------------------------------------------------------------------------------------------------- charts


def line_chart(
    series: Sequence[Series],
    y_label: str,
    x_label: str = "step",
    y_range: tuple[float | None, float | None] = (None, None),
    log: bool = False,
) -> str:
    """Lines over a common x axis; a bound of `y_range` holds unless the data go beyond it.

    `log`: a logarithmic y axis over at most six powers of ten; what is not positive is left out.
    """
    if log:
        series = [replace(s, ys=[y if y > 0 else math.nan for y in s.ys]) for s in series]
    series = [_thin(s) for s in series if any(math.isfinite(y) for y in s.ys)]
    if not series:
        return nothing("not recorded in this run")
    xs = [x for s in series for x in s.xs]
    ys = [y for s in series for y in s.ys if math.isfinite(y)]
    low = min([min(ys)] + [b for b in y_range[:1] if b is not None])
    high = max([max(ys)] + [b for b in y_range[1:] if b is not None])
    if log:
        top = math.ceil(math.log10(max(ys)))
        bottom = max(top - 6, min(top - 1, math.floor(math.log10(min(ys)))))
        y_ticks = [10.0**power for power in range(bottom, top + 1)]
        series = [replace(s, ys=[max(y, y_ticks[0]) for y in s.ys]) for s in series]
    else:
        y_ticks = ticks(low, high)
    x_low, x_high = min(xs), max(xs)
    if x_high <= x_low:
        x_low, x_high = x_low - 1, x_high + 1
    frame = Frame(x_low, x_high, y_ticks[0], y_ticks[-1], log)
    body = _axes(frame, ticks(x_low, x_high, 8, whole=x_label == "step"), y_ticks, x_label, y_label)
    for s in sorted(series, key=lambda s: s.style != "faint"):
        body += _draw(s, frame)
    data = {
        "x": [frame.x0, frame.x1],
        "xl": x_label,
        "s": [
            {"n": s.name, "c": s.colour, "x": [round(x, 4) for x in s.xs], "y": [_json_number(y) for y in s.ys]}
            for s in series
        ],
    }
    shades = [
        (s.name, f"color-mix(in srgb, {s.colour} 40%, transparent)" if s.style == "faint" else s.colour) for s in series
    ]
    return legend(shades) + _svg(body, y_label, data)


def _json_number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _draw(series: Series, frame: Frame) -> str:
    points = [(frame.x(x), frame.y(y)) if math.isfinite(y) else None for x, y in zip(series.xs, series.ys, strict=True)]
    if series.style == "dots":
        real = [p for p in points if p]
        path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(real))
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{series.colour}"/>' for x, y in real)
        return f'<path class="line thin dash" stroke="{series.colour}" d="{path}"/>{dots}'
    path, pen_down = "", False
    for point in points:
        if point:
            path += f"{'L' if pen_down else 'M'}{point[0]:.1f} {point[1]:.1f}"
        pen_down = point is not None
    kind = {"faint": "line faint", "dashed": "line thin dash"}.get(series.style, "line")
    drawn = f'<path class="{kind}" stroke="{series.colour}" d="{path}"/>'
    real = [p for p in points if p]
    if len(real) == 1 and series.style != "faint":
        drawn += f'<circle cx="{real[0][0]:.1f}" cy="{real[0][1]:.1f}" r="4" fill="{series.colour}"/>'
    return drawn


def stack_chart(xs: Sequence[float], layers: Mapping[str, tuple[str, Sequence[float]]], y_label: str) -> str:
    """Stacked bars: layers maps a name to (colour, value at each x). Many bars are averaged together."""
    layers = {name: layer for name, layer in layers.items() if any(v > 0 for v in layer[1] if math.isfinite(v))}
    if not xs or not layers:
        return nothing("not recorded in this run")
    stride = math.ceil(len(xs) / 160)
    starts = range(0, len(xs), stride)
    binned = {
        name: (colour, [_mean_of(values[i : i + stride]) for i in starts]) for name, (colour, values) in layers.items()
    }
    centres = [xs[min(len(xs) - 1, i + stride // 2)] for i in starts]
    totals = [sum(values[i] for _, values in binned.values()) for i in range(len(centres))]
    y_ticks = ticks(0, max(totals))
    half = (centres[1] - centres[0]) / 2 if len(centres) > 1 else 0.5
    frame = Frame(centres[0] - half, centres[-1] + half, 0, y_ticks[-1])
    body = _axes(frame, ticks(frame.x0, frame.x1, 8, whole=True), y_ticks, "step", y_label)
    width = max(1.0, (frame.x(half) - frame.x(-half)) * 0.86)
    base = [0.0] * len(centres)
    for colour, values in binned.values():
        path = ""
        for i, value in enumerate(values):
            top, bottom = frame.y(base[i] + value), frame.y(base[i])
            path += f"M{frame.x(centres[i]) - width / 2:.1f} {bottom:.1f}h{width:.1f}V{top:.1f}h{-width:.1f}z"
            base[i] += value
        body += f'<path fill="{colour}" d="{path}"/>'
    data = {
        "x": [frame.x0, frame.x1],
        "xl": "step",
        "s": [
            {"n": name, "c": colour, "x": list(centres), "y": [_json_number(v) for v in values]}
            for name, (colour, values) in binned.items()
        ],
    }
    return legend([(name, colour) for name, (colour, _) in binned.items()]) + _svg(body, y_label, data)


def _mean_of(values: Sequence[float]) -> float:
    good = [v for v in values if math.isfinite(v)]
    return sum(good) / len(good) if good else 0.0


def bar_chart(
    bars: Sequence[tuple[str, float, str]], x_label: str, y_label: str, colour: str, y_max: float = 0.0
) -> str:
    """Named bars: (name, height, words above it)."""
    if not bars:
        return nothing("not recorded in this run")
    # Room above the highest bar for its words.
    y_ticks = ticks(0, max(y_max, 1.08 * max(height for _, height, _ in bars)) or 1.0)
    frame = Frame(0, max(len(bars), 4), 0, y_ticks[-1])
    shown = [tick for tick in y_ticks if tick <= 100 or not y_label.endswith("%")]
    body = _axes(frame, [], shown, x_label, y_label)
    width = (frame.x(1) - frame.x(0)) * 0.72
    for i, (name, height, words) in enumerate(bars):
        x, y = frame.x(i + 0.5), frame.y(height)
        tall = max(0.0, HEIGHT - BOTTOM - y)
        body += f'<rect rx="2" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}" fill="{colour}"/>'
        body += f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>'
        body += f'<text class="value" x="{x:.1f}" y="{max(TOP, y - 5):.1f}" text-anchor="middle">{escape(words)}</text>'
    return _svg(body, y_label)


def share_bars(rows: Mapping[str, Sequence[tuple[str, str, float]]]) -> str:
    """One full-width bar a row, cut into (name, colour, share) with the rest left empty. HTML, since text must wrap."""
    if not rows:
        return nothing("no events recorded in this run")
    entries = dict.fromkeys(
        (name, colour) for pieces in rows.values() for name, colour, share in pieces if share > 0.0005
    )
    html = legend(list(entries))
    for row, pieces in rows.items():
        cut = "".join(
            f'<b style="width:{100 * share:.2f}%;background:{colour}" title="{escape(name)} {100 * share:.1f}%"></b>'
            for name, colour, share in pieces
            if share > 0.0005
        )
        total = min(1.0, sum(share for _, _, share in pieces))
        html += f'<div class="share"><span>{escape(row)}</span><div>{cut}</div><em>{100 * total:.0f}%</em></div>'
    return html
