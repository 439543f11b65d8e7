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
_JOIN_BYTES, _JOIN_S = 1 << 16, 5e-3
READ_AHEAD_BYTES = 1 << 23
"""What arrives before it is asked for: a batch of trajectories comes in one go."""


def pack(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpack(payload: bytes) -> Any:
    return pickle.loads(payload)


class FrameWriter:
    """Hands frames to the transport. Those that follow each other closely go in one write: a call of the kernel for
    each, and a wake-up of the other side, cost more than making them. None waits for longer than the loop's next turn, or
    behind a call that takes its time."""

    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self.stream = stream
        self._waiting: list[bytes] = []
        self._written_at = 0.0

    def write(self, kind: int, call_id: int, payload: bytes) -> None:
        """Never waits."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self.flush)
        much = len(payload) >= _JOIN_BYTES
        self._waiting.append(_HEADER.pack(kind, call_id, len(payload)))
        if not much:
            self._waiting.append(payload)
        # Much at a time goes at once, so that who waits for the pipe to have room learns that it has none.
        if much or loop.time() - self._written_at > _JOIN_S:
            self.flush()
            self._written_at = loop.time()
        if much:
            self.stream.write(payload)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.stream.write(b"".join(waiting))


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
