"""Turns the events of a run into who worked when: busy intervals, shares of a window, overlaps and waits. Pure.

An event covers [time_ns, time_ns + duration_ns): `time_ns` is when it *began*. A part is named by its source
("engine-0") or by the first part of the name ("engine" stands for all engines together).
An interval is (start_ns, end_ns); a list of intervals is sorted and disjoint once it went through `merge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from headrace.types import BUSY_KINDS, Event

Interval = tuple[int, int]

WAIT_KINDS = ("wait_batch", "wait_room", "wait_sync", "gate")
"""Event kinds during which the controller waits; see `BUSY_KINDS` for what each means."""


def part_of(source: str) -> str:
    """ "engine-0" -> "engine": the first part of a source's name."""
    return source.split("-", 1)[0]


def matches(source: str, part: str) -> bool:
    return source == part or part_of(source) == part


# ---------------------------------------------------------------------------------------------------- intervals


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted and disjoint intervals that cover the same time; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time that lies in both; both must be merged."""
    both: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time of `a` that is not in `b`; both must be merged."""
    left: list[Interval] = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                left.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


def total_ns(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    return intersect(intervals, [window]) if window[0] < window[1] else []


# ------------------------------------------------------------------------------------------------- what parts did


def busy_kinds(source: str) -> tuple[str, ...]:
    return BUSY_KINDS.get(part_of(source), ())


def busy_intervals(events: Iterable[Event], part: str, kinds: Sequence[str] | None = None) -> list[Interval]:
    """When `part` worked, merged; `kinds` narrows it to some kinds of work."""
    return merge(
        (event.time_ns, event.time_ns + event.duration_ns)
        for event in events
        if matches(event.source, part) and event.kind in (busy_kinds(event.source) if kinds is None else kinds)
    )


def busy_by_source(events: Sequence[Event]) -> dict[str, list[Interval]]:
    """The busy intervals of every source that can be busy, in order of first appearance."""
    return {source: busy_intervals(events, source) for source in working_sources(events)}


def working_sources(events: Iterable[Event]) -> list[str]:
    """Every source of a part that has busy kinds, in order of first appearance."""
    return [source for source in dict.fromkeys(event.source for event in events) if busy_kinds(source)]


def wait_intervals(events: Iterable[Event], kind: str) -> list[Interval]:
    return merge((event.time_ns, event.time_ns + event.duration_ns) for event in events if event.kind == kind)


def span(events: Sequence[Event]) -> Interval:
    """From the first beginning to the last end; (0, 0) without events."""
    if not events:
        return (0, 0)
    return (min(e.time_ns for e in events), max(e.time_ns + e.duration_ns for e in events))


def flow_window(events: Sequence[Event]) -> Interval:
    """The time in which the flow ran: from the first admission to the last trained batch, as far as they are recorded.

    What lies outside is loading, evaluation and saving; they would count as idle time of parts that had nothing to do.
    """
    start, end = span(events)
    start = min((e.time_ns for e in events if e.kind == "admitted"), default=start)
    end = max((e.time_ns for e in events if e.kind == "trained" and e.time_ns > start), default=end)
    return (start, end)


def busy_share(events: Sequence[Event], source: str, window: Interval | None = None) -> float:
    """Share of the window (default: the whole span) during which `source` works; 0 for an empty window."""
    window = span(events) if window is None else window
    length = window[1] - window[0]
    return total_ns(clip(busy_intervals(events, source), window)) / length if length > 0 else 0.0


def overlap_share(events: Sequence[Event], a: str, b: str, window: Interval | None = None) -> float:
    """Share of `b`'s busy time during which `a` is busy too; 0 when `b` never works."""
    window = span(events) if window is None else window
    busy_b = clip(busy_intervals(events, b), window)
    return total_ns(intersect(busy_intervals(events, a), busy_b)) / total_ns(busy_b) if busy_b else 0.0


def idle_shares(events: Sequence[Event], window: Interval | None = None) -> dict[str, float]:
    """Source -> share of the window in which it does not work."""
    window = span(events) if window is None else window
    return {source: 1.0 - busy_share(events, source, window) for source in working_sources(events)}


def wait_seconds(events: Sequence[Event], window: Interval | None = None) -> dict[str, float]:
    """Kind of wait -> seconds of the window in which at least one such wait was going on."""
    window = span(events) if window is None else window
    return {kind: total_ns(clip(wait_intervals(events, kind), window)) / 1e9 for kind in WAIT_KINDS}


# ------------------------------------------------------------------------------------------- runs that were resumed


def sessions(events: Sequence[Event], silence_s: float = 10.0, back_s: float = 60.0) -> list[list[Event]]:
    """Splits a record that several processes wrote one after another (a run that was killed and resumed).

    A border is a time of more than `silence_s` that no event covers (waiting is covered: waits are events), or a clock
    that jumped back by more than `back_s` (another boot of the machine). Late delivery alone is no border.
    """
    by_clock: list[list[Event]] = []
    latest = None
    for event in events:
        if latest is None or event.time_ns < latest - back_s * 1e9:
            by_clock.append([])
            latest = event.time_ns
        by_clock[-1].append(event)
        latest = max(latest, event.time_ns)
    parts: list[list[Event]] = []
    for one_clock in by_clock:
        covered: int | None = None
        for event in sorted(one_clock, key=lambda e: e.time_ns):
            if covered is None or event.time_ns - covered > silence_s * 1e9:
                parts.append([])
            parts[-1].append(event)
            covered = max(covered or event.time_ns, event.time_ns + event.duration_ns)
    return parts


def stitch(events: Sequence[Event]) -> list[Event]:
    """The events of all sessions one after another without the dead time between them, from 0 ns on, sorted by time."""
    stitched: list[Event] = []
    offset = 0
    for part in sessions(events):
        start, end = span(part)
        stitched += [replace(event, time_ns=event.time_ns - start + offset) for event in part]
        offset += end - start
    return stitched
