"""Turns calls, replies and errors into length-prefixed pickles between a controller and a worker that it spawned.

Pickle is allowed on this one wire: a socketpair that only the two processes hold, the worker being our own child.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import traceback
from typing import Any

from headrace.errors import HeadraceError, PartFailed

# kinds from the controller
INIT, CALL, STREAM, STOP_STREAM, CLOSE = 1, 2, 3, 4, 5
# kinds from the worker
READY, RESULT, ITEM, ERROR, EVENTS, CLOSED = 11, 12, 13, 14, 15, 16

_HEADER = struct.Struct("<BQQ")  # kind, call id, bytes that follow
_JOIN_BELOW_BYTES = 1 << 16


def pack(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpack(payload: bytes) -> Any:
    return pickle.loads(payload)


def write_frame(writer: asyncio.StreamWriter, kind: int, call_id: int, payload: bytes) -> None:
    """Hand one frame to the transport; never waits."""
    header = _HEADER.pack(kind, call_id, len(payload))
    if len(payload) < _JOIN_BELOW_BYTES:
        writer.write(header + payload)
    else:
        writer.write(header)
        writer.write(payload)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """kind, call id and payload. Raises IncompleteReadError or OSError when the other side is gone."""
    kind, call_id, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return kind, call_id, await reader.readexactly(size)


def pack_error(where: str, error: BaseException) -> tuple[bytes | None, str]:
    """The error as itself if it is one of ours (and travels), and in words with its traceback."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    words = f"{where}: {type(error).__name__}: {error}\n--- in the worker ---\n{trace}"
    if not isinstance(error, HeadraceError):
        return None, words
    try:
        return pack(error), words
    except Exception:
        return None, words


def unpack_error(packed: tuple[bytes | None, str]) -> HeadraceError:
    own, words = packed
    if own is not None:
        try:
            error = unpack(own)
            assert isinstance(error, HeadraceError)
            return error
        except Exception:  # a user's subclass that this process cannot rebuild: its words still arrive
            pass
    return PartFailed(words)
