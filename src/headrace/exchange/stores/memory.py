"""Keeps units in this process, in order of arrival, and counts their bytes against a bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.types import TokenSample, Unit


class MemoryStore:
    """`max_bytes` 0 sets no bound.

    A bounded store promises room for the largest unit seen so far at `reserve`, so that `append` never waits. Before the
    first unit its size is unknown, and after a larger one than promised the store may stand above its bound by the
    difference until units are acknowledged: nothing is lost, and `reserve` refuses meanwhile. One unit is always let in.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        if max_bytes < 0:
            raise ConfigError("buffer.max_bytes", f"must be 0 (no bound) or more, found {max_bytes}")
        self._max_bytes = max_bytes
        self._units: dict[str, tuple[Unit, int]] = {}
        self._reserved: dict[str, None] = {}
        self._bytes = 0
        self._largest = 0

    def reserve(self, key: str) -> bool:
        """Promise room for one unit. Asking again for a key that has room already changes nothing."""
        if key in self._reserved or key in self._units:
            return True
        promised = (len(self._reserved) + 1) * self._largest
        holds_any = bool(self._units or self._reserved)
        if self._max_bytes and holds_any and self._bytes + promised > self._max_bytes:
            return False
        self._reserved[key] = None
        return True

    def append(self, key: str, unit: Unit) -> None:
        """Store the unit, in place of an earlier one of this key."""
        self._reserved.pop(key, None)
        _, old = self._units.pop(key, (None, 0))
        size = unit_bytes(unit)
        self._units[key] = (unit, size)
        self._bytes += size - old
        self._largest = max(self._largest, size)

    def read(self, key: str) -> Unit:
        return self._units[key][0]

    def acknowledge(self, key: str) -> None:
        """Forget the unit, or the room that was promised for it."""
        self._reserved.pop(key, None)
        _, size = self._units.pop(key, (None, 0))
        self._bytes -= size

    def scan(self) -> list[str]:
        return list(self._units)

    def bytes(self) -> int:
        return self._bytes

    def close(self) -> None:
        self._units.clear()
        self._reserved.clear()
        self._bytes = 0


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
