"""Turns events into the strip of who worked when: one row per part, a path per kind of work, zoomable in the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from headrace.observability.activity import WAIT_KINDS, busy_kinds, span
from headrace.observability.charts import legend, nothing
from headrace.types import Event

KIND_COLOURS = {
    "generate": "var(--blue)",
    "prepare": "var(--violet)",
    "swap": "var(--red)",
    "score": "var(--teal)",
    "annotate": "var(--yellow)",
    "forward_backward": "var(--orange)",
    "optimizer_step": "var(--brown)",
    "publish": "var(--green)",
    "save": "var(--grey)",
    "wait_batch": "var(--wait1)",
    "wait_room": "var(--wait2)",
    "wait_sync": "var(--wait3)",
    "gate": "var(--wait4)",
}
KIND_NAMES = {
    "forward_backward": "forward + backward",
    "optimizer_step": "optimizer",
    "wait_batch": "no batch yet",
    "wait_room": "no room",
    "wait_sync": "last sync unfinished",
    "gate": "gate closed",
}
WAIT_ROWS = {
    "wait_batch": "trainer waits",
    "wait_room": "admission waits",
    "wait_sync": "trainer waits",
    "gate": "dispatch waits",
}
PART_ORDER = ("engine", "reward", "trainer")

MOST_PIECES = 30_000
FIRST_VIEW_S = 40.0
PLOT_WIDTH, ROW_HEIGHT, LABEL_WIDTH = 1180, 26, 130


def _row_of(event: Event) -> str | None:
    if event.kind in WAIT_KINDS:
        return WAIT_ROWS[event.kind]
    return event.source if event.kind in busy_kinds(event.source) else None


def _row_order(row: str) -> tuple[int, str]:
    for place, part in enumerate(PART_ORDER):
        if row == part or row.startswith(part + "-"):
            return (place, row)
    return (len(PART_ORDER), row)


def pieces(events: Sequence[Event]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(row, kind) -> (start_ms, end_ms) from the first event on; the latest MOST_PIECES, neighbours joined within 1 ms."""
    start = span(events)[0]
    worth = [e for e in events if e.duration_ns > 0 and _row_of(e) is not None]
    worth = sorted(worth, key=lambda e: e.time_ns)[-MOST_PIECES:]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in worth:
        row = found.setdefault((_row_of(event) or "", event.kind), [])
        begin = (event.time_ns - start) / 1e6
        end = begin + event.duration_ns / 1e6
        if row and begin - row[-1][1] < 1.0:
            row[-1] = (row[-1][0], max(row[-1][1], end))
        else:
            row.append((begin, end))
    return found


def strip(events: Sequence[Event]) -> str:
    """The zoomable strip; without a script it shows the last FIRST_VIEW_S seconds."""
    found = pieces(events)
    if not found:
        return nothing("no events recorded in this run")
    first, last = span(events)
    total_ms = max(1.0, (last - first) / 1e6)
    rows = sorted({row for row, _ in found}, key=_row_order)
    body = ""
    for (row, kind), intervals in found.items():
        top = rows.index(row) + 0.12
        path = "".join(f"M{a:.1f} {top:.2f}h{max(0.1, b - a):.1f}v.76h{-max(0.1, b - a):.1f}z" for a, b in intervals)
        name = f"{row}: {KIND_NAMES.get(kind, kind)}"
        body += f'<path fill="{KIND_COLOURS[kind]}" d="{path}"><title>{escape(name)}</title></path>'
    live = [(e.time_ns - first) / 1e6 for e in events if e.kind == "live"][-2000:]
    marks = "".join(f"M{at:.1f} 0V{len(rows)}" for at in live)
    body += f'<path class="mark" d="{marks}"/>'
    view_start = max(0.0, total_ms - FIRST_VIEW_S * 1000)
    height = len(rows) * ROW_HEIGHT
    labels = "".join(f'<div style="height:{ROW_HEIGHT}px">{escape(row)}</div>' for row in rows)
    view = f"{view_start:.1f} 0 {total_ms - view_start:.1f} {len(rows)}"
    kinds = [kind for kind in KIND_COLOURS if any(kind == k for _, k in found)]
    entries = [(KIND_NAMES.get(kind, kind), KIND_COLOURS[kind]) for kind in kinds]
    if live:
        entries.append(("new weights live", "var(--ink)"))
    spans = [(60, "last 60 s"), (20, "last 20 s"), (5, "last 5 s")]
    buttons = '<button data-span="0">whole run</button>'
    buttons += "".join(f'<button data-span="{s}">{name}</button>' for s, name in spans if s * 1000 < total_ms)
    return (
        f'<div class="tools">{legend(entries)}<div class="buttons">{buttons}</div></div>'
        f'<div class="strip"><div class="rows">{labels}</div>'
        f'<div class="plot"><svg preserveAspectRatio="none" viewBox="{view}" style="height:{height}px" '
        f'data-total="{total_ms:.1f}" data-rows="{len(rows)}">{body}</svg>'
        f'<div class="times">{_time_labels(view_start, total_ms)}</div></div></div>'
        '<p class="hint">scroll to zoom, drag to move; seconds since the first event</p>'
    )


def _time_labels(start_ms: float, end_ms: float) -> str:
    marks = [start_ms + (end_ms - start_ms) * i / 6 for i in range(7)]
    return "".join(f"<span>{mark / 1000:.1f} s</span>" for mark in marks)
