"""Collects events into events.jsonl while a run goes on, and turns them into a trace that Perfetto opens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headrace.observability.activity import (
    WAIT_KINDS,
    busy_by_source,
    busy_intervals,
    busy_share,
    flow_window,
    idle_shares,
    overlap_share,
    span,
    stitch,
    wait_seconds,
)
from headrace.observability.jsonl import JsonlWriter, read_jsonl
from headrace.types import NO_VERSION, Event

__all__ = [
    "Timeline",
    "busy_by_source",
    "busy_intervals",
    "busy_share",
    "chrome_trace",
    "flow_window",
    "idle_shares",
    "overlap_share",
    "read_events",
    "span",
    "stitch",
    "wait_seconds",
    "write_trace",
]

EVENTS_FILE = "events.jsonl"
TRACE_FILE = "timeline.json"

BUFFER_EVENTS = 128
FLUSH_AFTER_NS = 1_000_000_000


class Timeline:
    """Appends events to a run's record. Any thread may record.

    A row is [time_ns, source, kind, subject_id, version, duration_ns]. Rows reach the disk when 128 wait, when one comes
    a second after the last write, and at `flush`; a kill loses no more than those.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS_FILE
        self._lock = threading.Lock()
        self._writer = JsonlWriter(self.path, BUFFER_EVENTS)
        self._flushed_ns = 0

    def record(self, event: Event) -> None:
        row = [event.time_ns, event.source, event.kind, event.subject_id, event.version, event.duration_ns]
        with self._lock:
            self._writer.write(row)
            # The events' own clock decides, so that a simulated run writes in the same pieces every time.
            if event.time_ns - self._flushed_ns > FLUSH_AFTER_NS:
                self._writer.flush()
                self._flushed_ns = event.time_ns

    __call__ = record

    def flush(self) -> None:
        with self._lock:
            self._writer.flush()

    def close(self) -> None:
        with self._lock:
            self._writer.close()


def read_events(path: Path) -> list[Event]:
    """The events of a run folder or of an events.jsonl, in the order written. A damaged row is passed over."""
    path = path / EVENTS_FILE if path.is_dir() else path
    events = []
    for row in read_jsonl(path):
        try:
            time_ns, source, kind, subject_id, version, duration_ns = row
            events.append(
                Event(int(time_ns), str(source), str(kind), str(subject_id), int(version), max(0, int(duration_ns)))
            )
        except (TypeError, ValueError):
            continue
    return events


# --------------------------------------------------------------------------------------------------------- Perfetto

PROCESS_ORDER = ("controller", "engine", "reward", "trainer")


def _track_order(source: str) -> tuple[int, str]:
    for place, name in enumerate(PROCESS_ORDER):
        if source.startswith(name):
            return (place, source)
    return (len(PROCESS_ORDER), source)


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Events as Chrome trace JSON: one track per source, durations as slices, points as instants.

    Waits get tracks of their own ("controller wait_room"): they last across other work of the source, and slices on one
    track must nest. So do overlapping slices of one source (a reward pool that scores many at once).
    """
    start = span(events)[0]
    tracks: dict[str, int] = {}
    free_at: dict[str, list[int]] = {}
    rows: list[dict[str, Any]] = []
    for source in sorted({event.source for event in events}, key=_track_order):
        tracks[source] = len(tracks) + 1
    for event in sorted(events, key=lambda e: (e.time_ns, -e.duration_ns)):
        args: dict[str, Any] = {}
        if event.subject_id:
            args["subject"] = event.subject_id
        if event.version != NO_VERSION:
            args["version"] = event.version
        row = {"name": event.kind, "cat": event.source.split("-")[0], "pid": 1, "ts": (event.time_ns - start) / 1e3}
        if event.duration_ns > 0:
            track = f"{event.source} {event.kind}" if event.kind in WAIT_KINDS else event.source
            lanes = free_at.setdefault(track, [])
            lane = next((i for i, free in enumerate(lanes) if free <= event.time_ns), len(lanes))
            if lane == len(lanes):
                lanes.append(0)
            lanes[lane] = event.time_ns + event.duration_ns
            track = track if lane == 0 else f"{track} ({lane + 1})"
            row |= {"ph": "X", "dur": event.duration_ns / 1e3}
        else:
            track = event.source
            row |= {"ph": "i", "s": "t"}
        rows.append(row | {"tid": tracks.setdefault(track, len(tracks) + 1), "args": args})
    return {"traceEvents": _track_names(tracks) + rows, "displayTimeUnit": "ms"}


def _track_names(tracks: dict[str, int]) -> list[dict[str, Any]]:
    names: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "headrace"}}]
    for place, (track, tid) in enumerate(sorted(tracks.items(), key=lambda item: _track_order(item[0]))):
        names.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}})
        names.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": {"sort_index": place}})
    return names


def write_trace(events: Iterable[Event], path: Path) -> None:
    """Write `chrome_trace` to a file; open it at ui.perfetto.dev."""
    path.write_text(json.dumps(chrome_trace(list(events)), separators=(",", ":")), encoding="utf-8")
