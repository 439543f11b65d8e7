"""Keeps units in append-only files: what was put is there again after the process was killed.

    store/
      lock             held while the store is open: one run, one writer
      0000000001.log   records, oldest first; a new segment is begun at each opening, so a torn tail is never written to
      0000000002.log

A record is ``magic, crc32, kind, key's length, data's length, key, data``; the checksum covers all that follows it. Kinds:
a unit, and "forget" (no data). Segments go, oldest first, once none of their units is needed; in that order a "forget"
always outlives the unit that it speaks of.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import DataError, RunDirError, UnitLost
from headrace.exchange.codec import decode_unit, encode
from headrace.exchange.stores.room import Room
from headrace.types import Unit

_HEADER = struct.Struct("<4sIBHQ")
_MAGIC = b"HRU1"
_UNIT, _FORGET = 1, 2
SEGMENT_BYTES = 64 << 20
FLUSH_EVERY_S = 0.1
"""A file that is being flushed cannot be written to, so that a flush after each record would make each append wait."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record stands."""

    segment: int
    offset: int
    length: int


class FileStore:
    """A record is written when `append` returns, so the death of this process loses nothing; a thread brings it to the
    disk every `FLUSH_EVERY_S`, so the death of the machine loses at most what was put since.

    damaged: records that were found broken when the folder was opened; a torn last one is no damage
    keep_acknowledged: for a restore from the last checkpoint; without checkpoints nobody will ask for them
    """

    def __init__(
        self,
        folder: str,
        max_bytes: int = 0,
        *,
        keep_acknowledged: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._room = Room(max_bytes)
        self._folder, self._segment_bytes, self._keep = Path(folder), segment_bytes, keep_acknowledged
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(self._folder)
        self._places: dict[str, _Place] = {}
        self._acknowledged: dict[str, _Place] = {}
        self._files: dict[int, int] = {}  # segment -> descriptor, oldest first
        self._live: dict[int, int] = {}  # segment -> units in it that may still be needed
        self.damaged = self._segment = 0
        for number in self._segments():
            self._segment = number
            if self._path(number).is_file():
                self._load(number)
        self._end = 0
        self._flusher = _Flusher()
        self._begin_segment()

    # ---------------------------------------------------------------------------------------------------- the store

    def reserve(self, key: str) -> bool:
        return self._room.reserve(key)

    def append(self, key: str, unit: Unit) -> None:
        data = encode(unit)
        place = self._write(_UNIT, key, data)
        self._drop(self._places.pop(key, None))
        self._places[key] = place
        self._live[place.segment] += 1
        self._room.fill(key, len(data))

    def read(self, key: str) -> Unit:
        place = self._places[key]
        record = os.pread(self._files[place.segment], place.length, place.offset)
        found = _parse(record, 0)
        if found is None or found[1] != key:
            raise UnitLost(f"{self._path(place.segment)} no longer holds unit {key} as it was written")
        try:
            return decode_unit(found[2])
        except DataError as error:
            raise UnitLost(f"unit {key} in {self._path(place.segment)} is {error}") from None

    def acknowledge(self, key: str) -> None:
        self._room.free(key)
        place = self._places.pop(key, None)
        if place is None:
            return
        self._acknowledged[key] = place
        if not self._keep:
            self.forget([key])

    def acknowledged(self) -> list[str]:
        return list(self._acknowledged)

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            if (place := self._acknowledged.pop(key, None)) is not None:
                self._write(_FORGET, key, b"")
                self._drop(place)

    def scan(self) -> list[str]:
        return self._room.keys()

    def bytes(self) -> int:
        return self._room.bytes

    def close(self) -> None:
        if self._lock is None:
            return
        self._flusher.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        os.close(self._lock)
        self._lock = None

    # ------------------------------------------------------------------------------------------------------ writing

    def _write(self, kind: int, key: str, data: bytes) -> _Place:
        name = key.encode()
        body = _HEADER.pack(_MAGIC, 0, kind, len(name), len(data))[8:] + name
        crc = zlib.crc32(data, zlib.crc32(body))
        record = _MAGIC + crc.to_bytes(4, "little") + body
        if self._end and self._end + len(record) + len(data) > self._segment_bytes:
            self._begin_segment()
        descriptor = self._files[self._segment]
        try:
            written = os.writev(descriptor, [record, data])
            if written < len(record) + len(data):  # a signal, or a full disk: the rest, or the error that says why
                rest = memoryview(record + data)[written:]
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, self._end)  # the next record must not follow half of this one
            raise
        place = _Place(self._segment, self._end, len(record) + len(data))
        self._end += place.length
        self._flusher.dirty(descriptor)
        return place

    def _begin_segment(self) -> None:
        self._segment += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._files[self._segment] = os.open(self._path(self._segment), flags, 0o600)
        self._live[self._segment], self._end = 0, 0
        self._delete_dead()

    def _drop(self, place: _Place | None) -> None:
        if place is not None:
            self._live[place.segment] -= 1
            self._delete_dead()

    def _delete_dead(self) -> None:
        """Oldest first, so that no record outlives what says that it is forgotten."""
        for number in list(self._files):
            if number == self._segment or self._live[number]:
                return
            self._flusher.wait()
            os.close(self._files.pop(number))
            del self._live[number]
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}.log"

    # ------------------------------------------------------------------------------------------------------ opening

    def _segments(self) -> list[int]:
        return sorted(int(file.stem) for file in self._folder.glob("*.log") if file.stem.isdecimal())

    def _load(self, number: int) -> None:
        self._files[number] = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        self._live[number] = 0
        data = self._path(number).read_bytes()
        for kind, key, offset, length in self._records(data):
            if (old := self._places.pop(key, None)) is not None:
                self._live[old.segment] -= 1
                self._room.free(key)
            if kind == _UNIT:
                self._places[key] = _Place(number, offset, length)
                self._live[number] += 1
                self._room.fill(key, length - _HEADER.size - len(key.encode()))

    def _records(self, data: bytes) -> Iterator[tuple[int, str, int, int]]:
        """(kind, key, offset, length) of each whole record; broken stretches are passed over to the next whole one."""
        offset = 0
        while offset < len(data):
            found = _parse(data, offset)
            if found is not None:
                kind, key, _, length = found
                yield kind, key, offset, length
                offset += length
                continue
            following = data.find(_MAGIC, offset + 1)
            while following >= 0 and _parse(data, following) is None:
                following = data.find(_MAGIC, following + 1)
            if following < 0:
                self.damaged += not data.startswith(_MAGIC[: len(data) - offset], offset)
                return
            self.damaged += 1
            offset = following


def _parse(data: bytes, offset: int) -> tuple[int, str, memoryview, int] | None:
    """(kind, key, data, length) of the record at `offset`; None when it is not whole."""
    if offset + _HEADER.size > len(data):
        return None
    magic, crc, kind, key_bytes, data_bytes = _HEADER.unpack_from(data, offset)
    length = _HEADER.size + key_bytes + data_bytes
    if magic != _MAGIC or kind not in (_UNIT, _FORGET) or offset + length > len(data):
        return None
    record = memoryview(data)[offset : offset + length]
    if zlib.crc32(record[8:]) != crc:
        return None
    start = _HEADER.size + key_bytes
    return kind, bytes(record[_HEADER.size : start]).decode(), record[start:], length


def _take_lock(folder: Path) -> int:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunDirError(
            f"{folder / 'lock'} cannot be opened ({error.strerror}): is this the folder of a store?"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunDirError(f"{folder} is in use by another run; end that one first") from None
    return descriptor


class _Flusher:
    """Brings written records to the disk from a thread of its own: a flush takes milliseconds, and `append` may not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._dirty: set[int] = set()
        self._busy = False
        self._closed = False
        self._hurry = False
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="store-flush", daemon=True)
        self._thread.start()

    def dirty(self, descriptor: int) -> None:
        """Raises what the disk said to an earlier flush."""
        with self._changed:
            if self._problem is not None:
                raise self._problem
            self._dirty.add(descriptor)
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all that was written is on the disk."""
        with self._changed:
            self._hurry = bool(self._dirty)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._dirty and not self._busy)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._closed)
                if not self._dirty:
                    return
                if not self._closed and not self._hurry:
                    self._changed.wait_for(lambda: self._closed or self._hurry, FLUSH_EVERY_S)
                work, self._dirty, self._busy, self._hurry = self._dirty, set(), True, False
            problem = None
            for descriptor in work:
                try:
                    os.fdatasync(descriptor)
                except OSError as error:
                    problem = error
            with self._changed:
                self._busy, self._problem = False, problem or self._problem
                self._changed.notify_all()
