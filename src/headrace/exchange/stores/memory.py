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
        self._room = Room(max_bytes)
        self._units: dict[str, Unit] = {}

    def reserve(self, key: str) -> bool:
        return self._room.reserve(key)

    def append(self, key: str, unit: Unit) -> None:
        self._units[key] = unit
        self._room.fill(key, unit_bytes(unit))

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
        return self._room.bytes

    def close(self) -> None:
        self._units.clear()


def unit_bytes(value: Any) -> int:
    """Bytes of all arrays and strings inside a unit; other leaves (numbers, flags) count 8 each."""
    if isinstance(value, np.ndarray | TokenSample):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    if dataclasses.is_dataclass(value):
        names = getattr(value, "__slots__", None) or [field.name for field in dataclasses.fields(value)]
        return sum(unit_bytes(getattr(value, name)) for name in names)
    if isinstance(value, dict):
        return sum(unit_bytes(key) + unit_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(unit_bytes(item) for item in value)
    return 0 if value is None else getattr(value, "nbytes", 8)
