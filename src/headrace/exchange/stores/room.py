"""Sizes of stored units and promises for coming ones, into one answer: is there room for one more?"""

from __future__ import annotations

from headrace.errors import ConfigError


class Room:
    """The accounting that every store shares. `max_bytes` 0 sets no bound.

    A bounded store promises room for the largest unit seen so far at `reserve`, so that `append` never waits. Before the
    first unit its size is unknown, and after a larger one than promised the store may stand above its bound by the
    difference until units are acknowledged: nothing is lost, and `reserve` refuses meanwhile. One unit is always let in.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        if max_bytes < 0:
            raise ConfigError("buffer.max_bytes", f"must be 0 (no bound) or more, found {max_bytes}")
        self.bytes = 0
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        self._promised: dict[str, None] = {}
        self._largest = 0

    def reserve(self, key: str) -> bool:
        """Promise room for one unit. Asking again for a key that has room already changes nothing."""
        if key in self._promised or key in self._sizes:
            return True
        promised = (len(self._promised) + 1) * self._largest
        if self._max_bytes and (self._sizes or self._promised) and self.bytes + promised > self._max_bytes:
            return False
        self._promised[key] = None
        return True

    def fill(self, key: str, size: int) -> None:
        """A unit has come, in place of an earlier one of its key."""
        self._promised.pop(key, None)
        self.bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        self._largest = max(self._largest, size)

    def free(self, key: str) -> None:
        """The unit has gone, or the promise for it."""
        self._promised.pop(key, None)
        self.bytes -= self._sizes.pop(key, 0)

    def keys(self) -> list[str]:
        """Keys of stored units, oldest first."""
        return list(self._sizes)

    def holds(self, key: str) -> bool:
        return key in self._sizes
