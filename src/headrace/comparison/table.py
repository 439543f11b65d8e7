"""Figures into a text table, a Markdown table, and a page with the table and the curves drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from headrace.comparison.figures import Figures, common_limits, reward_at
from headrace.observability.charts import Series, line_chart

COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")


def cells(runs: Sequence[Figures], *, rewards: bool) -> list[list[str]]:
    """The table, its heading first. rewards: with the two columns of reward at equal time and at equal samples."""
    seconds, samples = common_limits(runs)
    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("preset", lambda f: f.name + ("*" if f.note else "")),
        ("samples/s", lambda f: number(f.samples_per_s) + between(f)),
        ("tokens/s", lambda f: number(f.tokens_per_s)),
        ("trainer idle", lambda f: share(f.trainer_idle)),
        ("engine idle", lambda f: share(f.engine_idle)),
        ("wait p99 s", lambda f: number(f.wait_p99_s)),
        ("lag mean/p99/max", lambda f: "/".join(map(number, (f.lag_mean, f.lag_p99, f.lag_max)))),
        ("dropped", lambda f: ", ".join(f"{count} {reason}" for reason, count in f.drops.items()) or "0"),
        ("sync s", lambda f: number(f.sync_s)),
        ("stand-still s", lambda f: number(f.standstill_s)),
        ("length bias", lambda f: f"{f.length_bias:+.1%}" if math.isfinite(f.length_bias) else "-"),
    ]
    if rewards:
        columns += [
            ("ESS", lambda f: number(f.ess)),
            (f"reward at {number(seconds)} s", lambda f: number(reward_at(f, seconds, 0))),
            (f"at {number(samples)} samples", lambda f: number(reward_at(f, samples, 1))),
        ]
    return [[title for title, _ in columns], *([make(run) for _, make in columns] for run in runs)]


def notes(runs: Sequence[Figures]) -> list[str]:
    """A line for each preset that did not end well."""
    return [f"{run.name}: {run.note}" for run in runs if run.note]


def between(figures: Figures) -> str:
    """The range over repetitions, in brackets."""
    return f" ({number(figures.between[0])}-{number(figures.between[1])})" if figures.between else ""


def number(value: float) -> str:
    """Three figures; "-" for what is not known."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def share(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def page(title: str, rows: Sequence[Sequence[str]], runs: Sequence[Figures]) -> str:
    """One self-contained HTML page."""
    style = (files("headrace.observability") / "page.css").read_text(encoding="utf-8")
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    said = "".join(f"<p>* {escape(note)}</p>" for note in notes(runs))
    drawn = _bars("Samples a second", runs, lambda f: f.samples_per_s) + _bars(
        "Trainer idle, share of the time", runs, lambda f: f.trainer_idle
    )
    if any(run.curves for run in runs):
        drawn += _curves("Reward over seconds", runs, 0, "seconds") + _curves("Reward over samples", runs, 1, "samples")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style} table{{border-collapse:collapse}} td,th{{padding:.25em .7em;"
        "text-align:left;border-bottom:1px solid #8884;white-space:nowrap} .wide{overflow-x:auto}</style></head><body>"
        f"<main><h1>{escape(title)}</h1><div class='wide'><table><tr>{head}</tr>{body}</table></div>{said}{drawn}</main></body></html>"
    )


def _bars(title: str, runs: Sequence[Figures], value: Callable[[Figures], float]) -> str:
    """Horizontal bars, one a preset, each with its number."""
    known = [(run.name, value(run)) for run in runs if math.isfinite(value(run))]
    longest = max((size for _, size in known), default=0.0) or 1.0
    height = 22 * len(known) + 6
    bars = "".join(
        f'<text x="0" y="{22 * i + 16}" fill="currentColor">{escape(name)}</text>'
        f'<rect x="160" y="{22 * i + 4}" width="{400 * size / longest:.1f}" height="15" fill="{COLOURS[i % len(COLOURS)]}"/>'
        f'<text x="{166 + 400 * size / longest:.1f}" y="{22 * i + 16}" fill="currentColor">{number(size)}</text>'
        for i, (name, size) in enumerate(known)
    )
    return f'<h2>{escape(title)}</h2><svg viewBox="0 0 640 {height}" width="640" font-size="12">{bars}</svg>'


def _curves(title: str, runs: Sequence[Figures], column: int, x_label: str) -> str:
    series = [
        Series(
            name=run.name,
            xs=[point[column] for point in run.curves[0]],
            ys=[point[2] for point in run.curves[0]],
            colour=COLOURS[i % len(COLOURS)],
        )
        for i, run in enumerate(runs)
        if run.curves
    ]
    return f"<h2>{escape(title)}</h2>{line_chart(series, 'reward', x_label)}"
