"""Rows to and from JSON lines: an appender that a kill can tear only in its last line, and a reader that forgives that."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""`json.dumps` with other options than its own makes an encoder for every call."""


def read_jsonl(path: Path) -> list[Any]:
    """Every line that parses, in order. An absent file gives no rows; torn and empty lines are passed over."""
    if not path.is_file():
        return []
    rows = []
    with path.open("rb") as file:
        for line in file:
            try:
                rows.append(json.loads(line))
            except ValueError:
                # A process that was killed while writing leaves half a line; what stands before it is whole.
                continue
    return rows


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN or infinity: they are stored as null."""
    return value if math.isfinite(value) else None


class JsonlWriter:
    """Appends whole lines, many at a time.

    A torn last line of an earlier, killed process is cut off at opening, so that the first new row stays readable.
    """

    def __init__(self, path: Path, buffer_rows: int = 1) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._cut_torn_line()
        # Unbuffered: a flush is one write of whole lines, so a kill between two flushes leaves no half line.
        self._file = path.open("ab", buffering=0)
        self._buffer_rows = buffer_rows
        self._lines: list[str] = []

    def _cut_torn_line(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - 65536)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    file.truncate(start + newline + 1)
                    return
                end = start
            file.truncate(0)

    def write(self, row: Any) -> None:
        self._lines.append(_encode(row))
        if len(self._lines) >= self._buffer_rows:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            data = ("\n".join(self._lines) + "\n").encode(errors="replace")
            self._lines.clear()
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        """Idempotent."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()
