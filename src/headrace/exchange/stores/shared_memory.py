"""Keeps units in slots of shared memory: between processes only a slot's place travels, never the bytes.

    producer                                       owner of the store
      arena.place(unit) ──▶ Placed, ~100 bytes ──▶ store.append(key, placed) ... read(key) ... acknowledge(key)
      takes the slot again  ◀── one byte in the slot says that it is free ──┘

An arena is an anonymous file in memory (memfd) with one writer; others open it through /proc/WRITER/fd. It has no name,
so nothing is left behind whoever is killed, and units of a dead producer stay readable for whoever has adopted them.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import DataError, UnitLost
from headrace.exchange.codec import decode_unit, encode
from headrace.exchange.stores.room import Room
from headrace.types import Array, Unit, travels

_SLOT = struct.Struct("<BxxxxxxxQQ")  # state, serial, bytes of the unit
_FREE, _FULL = 0, 1
_SMALLEST_SLOT_BYTES = 4096
_SMALLEST_ARENA_BYTES = 1 << 20


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRef:
    """Where a unit lies: the arena, the slot's offset in it, and which use of the slot this is."""

    arena: str
    offset: int
    serial: int
    bytes: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A unit by its place, with what a buffer asks of it."""

    ref: SlotRef
    unit_id: str
    oldest_version: int
    size: int

    @property
    def policy_versions(self) -> Array:
        """[1] the oldest alone, for who asks before the unit is read."""
        return np.array([self.oldest_version])


class Arena:
    """The writer's side. Slots have sizes of powers of two, and are used again once their reader has freed them."""

    def __init__(self) -> None:
        token = secrets.token_hex(8)
        self._file = os.memfd_create(f"headrace-units-{token}", os.MFD_CLOEXEC)
        self.locator = f"{os.getpid()}:{self._file}:{token}"
        os.ftruncate(self._file, _SMALLEST_ARENA_BYTES)
        self._map = mmap.mmap(self._file, _SMALLEST_ARENA_BYTES)
        self._end = 0
        self._serial = 0
        self._given: dict[int, deque[int]] = {}  # size -> offsets of slots, the longest given out first

    def write(self, unit: Unit) -> SlotRef:
        """Put a unit into a free slot, or a new one. Never waits; who admits bounds what is in flight."""
        return self.write_bytes(encode(unit))

    def place(self, unit: Unit) -> Placed:
        """The unit's place, to be handed to a store in its stead."""
        return Placed(ref=self.write(unit), unit_id=unit.unit_id, oldest_version=unit.oldest_version, size=unit.size)

    def write_bytes(self, data: bytes) -> SlotRef:
        size = max(_SMALLEST_SLOT_BYTES, 1 << (len(data) + _SLOT.size - 1).bit_length())
        offset = self._free_slot(size)
        self._serial += 1
        start = offset + _SLOT.size
        self._map[start : start + len(data)] = data
        _SLOT.pack_into(self._map, offset, _FULL, self._serial, len(data))
        return SlotRef(arena=self.locator, offset=offset, serial=self._serial, bytes=len(data))

    def _free_slot(self, size: int) -> int:
        given = self._given.setdefault(size, deque())
        for _ in range(len(given)):
            offset = given.popleft()
            given.append(offset)
            if self._map[offset] == _FREE:
                return offset
        offset, self._end = self._end, self._end + size
        if self._end > len(self._map):
            self._map.resize(max(2 * len(self._map), self._end))
        given.append(offset)
        return offset

    def close(self) -> None:
        """Readers keep what they have adopted."""
        self._map.close()
        os.close(self._file)


class _Window:
    """A reader's side of one arena."""

    def __init__(self, locator: str) -> None:
        try:
            pid, descriptor, token = locator.split(":")
            path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
            if f"headrace-units-{token}" not in os.readlink(path):
                raise FileNotFoundError(path)
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except ValueError:
            raise DataError(f"not a place in shared memory: {locator!r}") from None
        except OSError as error:
            raise UnitLost(
                f"the arena {locator} is gone ({error.strerror}): its writer has closed it or died"
            ) from None
        self._map = mmap.mmap(self._file, 0)

    def read(self, ref: SlotRef) -> Unit:
        self._check(ref)
        start = ref.offset + _SLOT.size
        return decode_unit(self._map[start : start + ref.bytes])  # a copy: a view in a traceback would pin the mapping

    def free(self, ref: SlotRef) -> None:
        self._check(ref)
        self._map[ref.offset] = _FREE

    def _check(self, ref: SlotRef) -> None:
        """The slot holds what the reference says. Raises `UnitLost` for another use of it."""
        end = ref.offset + _SLOT.size + ref.bytes
        if end > len(self._map) and end <= os.fstat(self._file).st_size:  # the writer has enlarged it
            self._map.close()
            self._map = mmap.mmap(self._file, 0)
        if not 0 <= ref.offset < end <= len(self._map):
            raise DataError(f"slot at {ref.offset} with {ref.bytes} bytes is outside its arena")
        if _SLOT.unpack_from(self._map, ref.offset) != (_FULL, ref.serial, ref.bytes):
            raise UnitLost(f"the slot at {ref.offset} was freed and holds another unit")

    def close(self) -> None:
        self._map.close()
        os.close(self._file)


class SharedMemoryStore:
    """Units that this process appends go to an arena of its own; those of other processes stay in theirs."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._room = Room(max_bytes)
        self._arena = Arena()
        self._refs: dict[str, SlotRef] = {}
        self._windows: dict[str, _Window] = {}

    def reserve(self, key: str) -> bool:
        return self._room.reserve(key)

    def append(self, key: str, unit: Unit | Placed) -> None:
        self.adopt(key, unit.ref if isinstance(unit, Placed) else self._arena.write(unit))

    def adopt(self, key: str, ref: SlotRef) -> None:
        """Take over a unit that another process has written; from now on it does not need its writer."""
        if ref.arena not in self._windows:
            self._windows[ref.arena] = _Window(ref.arena)
        self._windows[ref.arena]._check(ref)
        self._free(key)
        self._refs[key] = ref
        self._room.fill(key, ref.bytes)

    def ref(self, key: str) -> SlotRef:
        """The unit's place, for another process to read by `read_slot` before this store acknowledges it."""
        return self._refs[key]

    def read(self, key: str) -> Unit:
        ref = self._refs[key]
        return self._windows[ref.arena].read(ref)

    def acknowledge(self, key: str) -> None:
        self._room.free(key)
        self._free(key)

    def acknowledged(self) -> list[str]:
        return []

    def forget(self, keys: Sequence[str]) -> None:
        """Nothing is kept beyond its acknowledgement."""

    def scan(self) -> list[str]:
        return self._room.keys()

    def bytes(self) -> int:
        return self._room.bytes

    def close(self) -> None:
        for window in self._windows.values():
            window.close()
        if self._arena is not None:
            self._arena.close()
        self._windows, self._refs, self._arena = {}, {}, None  # type: ignore[assignment]

    def _free(self, key: str) -> None:
        if (ref := self._refs.pop(key, None)) is None:
            return
        self._windows[ref.arena].free(ref)
        own = ref.arena == self._arena.locator
        if not own and not any(other.arena == ref.arena for other in self._refs.values()):
            self._windows.pop(ref.arena).close()  # its writer may be dead: nothing else would give the memory back


def read_slot(ref: SlotRef) -> Unit:
    """A unit by its place alone, from any process of this user."""
    window = _Window(ref.arena)
    try:
        return window.read(ref)
    finally:
        window.close()
