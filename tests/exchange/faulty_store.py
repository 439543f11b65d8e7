"""A store around a real one that refuses, fails, repeats and loses, each with its own probability."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import UnitLost
from headrace.protocols import Store
from headrace.types import Unit


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities at each call; `at` runs something (a server's restart) at the so-many-th append."""

    refuse: float = 0.0
    full: float = 0.0
    slow: float = 0.0
    twice: float = 0.0
    lose: float = 0.0
    at: tuple[int, Callable[[], None]] | None = None


class FaultyStore:
    """Counts what it did wrong in `done`."""

    def __init__(self, inner: Store, faults: Faults, seed: int) -> None:
        self.inner, self.faults = inner, faults
        self.rng = random.Random(f"store {seed}")
        self.appends = 0
        self.lost: set[str] = set()
        self.done: dict[str, int] = {}

    def _happens(self, name: str, share: float) -> bool:
        happens = self.rng.random() < share
        self.done[name] = self.done.get(name, 0) + happens
        return happens

    def reserve(self, key: str) -> bool:
        return not self._happens("refuse", self.faults.refuse) and self.inner.reserve(key)

    def append(self, key: str, unit: Unit) -> None:
        self.appends += 1
        if self.faults.at is not None and self.appends == self.faults.at[0]:
            self.faults.at[1]()
        if self._happens("full", self.faults.full):
            raise OSError(errno.ENOSPC, "No space left on device")
        if self._happens("slow", self.faults.slow):
            time.sleep(0.005)
        self.inner.append(key, unit)
        if self._happens("twice", self.faults.twice):
            self.inner.append(key, unit)
        if self._happens("lose", self.faults.lose):
            self.lost.add(key)

    def read(self, key: str) -> Unit:
        unit = self.inner.read(key)
        if key in self.lost:
            raise UnitLost(f"unit {key} was lost on purpose")
        return unit

    def acknowledge(self, key: str) -> None:
        self.inner.acknowledge(key)

    def acknowledged(self) -> list[str]:
        return self.inner.acknowledged()

    def forget(self, keys: Sequence[str]) -> None:
        self.inner.forget(keys)

    def scan(self) -> list[str]:
        return self.inner.scan()

    def bytes(self) -> int:
        return self.inner.bytes()

    def close(self) -> None:
        self.inner.close()
