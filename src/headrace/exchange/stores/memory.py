"""Keeps units in this process, in order of arrival, and counts their bytes against a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.exchange.stores.room import Room
from headrace.types import Group, Unit


class MemoryStore:
    """`max_bytes` 0 sets no bound. What it holds ends with the process; the checkpoint has its own copy of what waits."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._room, self._bounded = Room(max_bytes), max_bytes > 0
        self._units: dict[str, Unit] = {}

    def reserve(self, key: str) -> bool:
        return self._room.reserve(key)

    def append(self, key: str, unit: Unit) -> None:
        self._units[key] = unit
        # Without a bound nobody needs the size until somebody asks.
        self._room.fill(key, unit_bytes(unit) if self._bounded else 0)

    def read(self, key: str) -> Unit:
        return self._units[key]

    def acknowledge(self, key: str) -> None:
        self._units.pop(key, None)
        self._room.free(key)

    def acknowledged(self) -> list[str]:
        return []

    def forget(self, keys: Sequence[str]) -> None:
        """Nothing is kept beyond its acknowledgement."""

    def scan(self) -> list[str]:
        return self._room.keys()

    def bytes(self) -> int:
        return self._room.bytes if self._bounded else sum(map(unit_bytes, self._units.values()))

    def close(self) -> None:
        self._units.clear()


def unit_bytes(unit: Unit) -> int:
    """Bytes of all arrays inside a unit, which is all but a few hundred of what it takes."""
    if isinstance(unit, Group):
        samples = sum(sample.nbytes for episode in unit.episodes for sample in episode.samples)
        return samples + sum(_nbytes(score.per_token) + _nbytes(score.teacher_logprobs) for score in unit.scores)
    return sum(_nbytes(getattr(unit, field.name)) for field in dataclasses.fields(unit))


def _nbytes(value: Any) -> int:
    """Of an array, or of the arrays that a dict holds."""
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return value.nbytes if isinstance(value, np.ndarray) else 0
