"""Keeps units in this process, in order of arrival, and counts their bytes against a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.exchange.stores.room import Room
from headrace.types import TokenSample, Unit


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


_NAMES: dict[type, tuple[str, ...]] = {}
"""Record type -> its fields: asking for them costs more than adding them up."""


def unit_bytes(value: Any) -> int:
    """Bytes of all arrays and strings inside a unit; other leaves (numbers, flags) count 8 each."""
    if type(value) is float or type(value) is int:
        return 8
    if isinstance(value, np.ndarray | TokenSample):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    names = _NAMES.get(type(value))
    if names is None and dataclasses.is_dataclass(value):
        names = _NAMES[type(value)] = tuple(field.name for field in dataclasses.fields(value))
    if names is not None:
        return sum([unit_bytes(getattr(value, name)) for name in names])
    if isinstance(value, dict):
        return sum(unit_bytes(key) + unit_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(unit_bytes(item) for item in value)
    return 0 if value is None else getattr(value, "nbytes", 8)
