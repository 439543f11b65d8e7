"""Turns rows of metrics into lines of metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from headrace.observability.jsonl import JsonlWriter, finite_or_none

METRICS_FILE = "metrics.jsonl"


class JsonlSink:
    """{"step": 3, "reward/mean": 0.5, ...} a line, on disk at once. NaN and infinity are written as null."""

    def __init__(self, folder: Path) -> None:
        self._writer = JsonlWriter(folder / METRICS_FILE)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._writer.write({"step": step} | {name: finite_or_none(value) for name, value in values.items()})

    def close(self) -> None:
        self._writer.close()
