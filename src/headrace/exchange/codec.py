"""Units into bytes and back, by msgpack against the declared types: what comes from disk or from outside is data."""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import DataError
from headrace.types import Group, Task, Trajectory, Unit

_LENGTH = struct.Struct("<Q")
_KINDS = "biuf"
"""Array kinds that may be read: never objects."""


_name = lru_cache(maxsize=64)(operator.attrgetter("str"))
_type = lru_cache(maxsize=64)(np.dtype)
"""numpy makes a type's name, and the type of a name, anew each time: that is half of the time of a small array."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": _name(value.dtype), "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot be read")
    dtype = _type(value["dtype"])
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of type {dtype} is not accepted")
    return np.frombuffer(value["data"], dtype).reshape(value["shape"])


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_groups = msgspec.msgpack.Decoder(Group, dec_hook=_decode_array)
_trajectories = msgspec.msgpack.Decoder(Trajectory, dec_hook=_decode_array)
_tasks = msgspec.msgpack.Decoder(Task, dec_hook=_decode_array)
_WRONG = (msgspec.MsgspecError, ValueError, TypeError, KeyError)
"""What bytes that are not what they say raise in a decoder."""


def encode(value: Unit | Task) -> bytes:
    return _encoder.encode(value)


def decode_group(data: bytes) -> Group:
    """Raises `DataError` for bytes that are not a group."""
    try:
        return _groups.decode(data)
    except _WRONG as error:
        raise DataError(f"not a scored group: {error}") from None


def decode_unit(data: bytes | memoryview) -> Unit:
    """A group or a trajectory, told apart by its first field. Raises `DataError` for bytes that are neither."""
    if bytes(data[:32]).find(b"group_id", 1, 16) < 0:
        try:
            return _trajectories.decode(data)
        except _WRONG as error:
            raise DataError(f"not a unit: {error}") from None
    return decode_group(data)


def decode_task(data: bytes) -> Task:
    return _tasks.decode(data)


class GroupWriter:
    """Appends groups to a file as length-prefixed records; each is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def write(self, group: Group) -> int:
        data = encode(group)
        self._file.write(_LENGTH.pack(len(data)) + data)
        self._file.flush()
        os.fsync(self._file.fileno())
        return len(data)

    def close(self) -> None:
        self._file.close()


def read_groups(path: Path) -> Iterator[Group]:
    """The groups of a file, or of all `.groups` files of a folder in order of name. A torn last record is left out."""
    files = sorted(path.glob("*.groups")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no .groups file in it; make some with `headrace run CONFIG --only rollout`")
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                if length > size - stream.tell():
                    break
                yield decode_group(stream.read(length))
