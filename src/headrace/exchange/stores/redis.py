"""Keeps units in a Redis stream: they outlive this process, and actors that know only an address can add to them.

    append ──▶ queue ──▶ writer thread ──XADD──▶ stream ──XREADGROUP──▶ read          forget ──▶ XACK, XDEL
    actor elsewhere, RedisSender ──────XADD──────▶│      (with `accept`; else what others add is refused)

Delivery is at least once: a writer that lost the reply to an XADD sends the unit again, and the reader removes the second
entry by its key. What was read and not forgotten stays in the consumer group's list of pending entries, from which the
next incarnation of the run takes it over.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from headrace.errors import DataError, PartFailed, UnitLost
from headrace.exchange.codec import decode_unit, encode
from headrace.exchange.stores.redis_stream import (
    BATCH,
    CONSUMER,
    GROUP,
    PASSING,
    Entry,
    StreamWriter,
    back_off,
    connect,
    shown,
)
from headrace.exchange.stores.room import Room
from headrace.types import Unit

T = TypeVar("T")


class RedisStore:
    """One stream, one consumer. Only `read` asks the server and waits for the answer, at most `retry_s`.

    max_pending: so many units may wait for a server that is away or full; then `reserve` refuses
    accept: units of other senders are welcome, and `arrivals` names them; without it such entries are removed and counted
    duplicates: entries that were removed because their unit was there already; refused: because nobody here sent them
    """

    def __init__(
        self,
        url: str,
        stream: str,
        max_bytes: int = 0,
        *,
        keep_acknowledged: bool = True,
        retry_s: float = 15.0,
        max_pending: int = 64,
        accept: bool = False,
    ) -> None:
        self._room = Room(max_bytes)
        self._url, self._stream, self._keep = url, stream, keep_acknowledged
        self._retry_s, self._max_pending = retry_s, max_pending
        self.duplicates = self.refused = 0
        self._accept = True  # what an earlier incarnation has sent is ours
        self._session = secrets.token_hex(8)
        self._appended = 0
        self._nonces: dict[str, str] = {}  # of each key that is stored or kept
        self._ids: dict[str, bytes] = {}  # of those that were delivered
        self._delivered: dict[str, bytes] = {}  # bytes that came along and were not read yet
        self._acknowledged: dict[str, None] = {}
        self._arrived: list[str] = []
        owner = f"headrace-{hashlib.blake2b(stream.encode(), digest_size=8).hexdigest()}-"
        self._client = connect(url, name=owner + self._session)
        self._writer = StreamWriter(url, stream)
        try:
            if not accept:
                self._refuse_another(owner)
            self._take_over()
        except redis.RedisError as error:
            self._writer.close(0.0)
            raise PartFailed(
                f"buffer.url: no Redis server answers at {shown(url)} ({error}); start one, or choose buffer.store = files"
            ) from None
        except PartFailed:
            self._writer.close(0.0)
            raise
        self._accept = accept

    # ---------------------------------------------------------------------------------------------------- the store

    def reserve(self, key: str) -> bool:
        return self._writer.waiting < self._max_pending and self._room.reserve(key)

    def append(self, key: str, unit: Unit) -> None:
        self._remove(key)
        self._appended += 1
        entry = Entry(key, f"{self._session}-{self._appended}", encode(unit))
        self._nonces[key] = entry.nonce
        self._acknowledged.pop(key, None)
        self._writer.add(entry)
        self._room.fill(key, len(entry.data))

    def read(self, key: str) -> Unit:
        if not self._room.holds(key):
            raise KeyError(key)
        data = self._writer.pending(key) or self._delivered.pop(key, None) or self._patiently(lambda: self._fetch(key))
        if data is None:
            raise UnitLost(
                f"the stream {self._stream} no longer holds unit {key}; a server without appendonly forgets all when it restarts"
            )
        try:
            return decode_unit(data)
        except DataError as error:
            raise UnitLost(f"unit {key} in the stream {self._stream} is {error}") from None

    def acknowledge(self, key: str) -> None:
        if self._room.holds(key):
            self._delivered.pop(key, None)
            self._acknowledged[key] = None
        self._room.free(key)
        if not self._keep:
            self.forget([key])

    def acknowledged(self) -> list[str]:
        return list(self._acknowledged)

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self._acknowledged:
                del self._acknowledged[key]
                self._remove(key)

    def scan(self) -> list[str]:
        return self._room.keys()

    def bytes(self) -> int:
        return self._room.bytes

    def arrivals(self, wait_s: float = 0.0) -> list[str]:
        """Keys of units that others have sent since the last call; without any, of those that come within `wait_s`."""
        self._patiently(lambda: self._deliver(int(1000 * wait_s) or None))
        arrived, self._arrived = self._arrived, []
        return arrived

    def flush(self, timeout_s: float) -> bool:
        """Wait until the server has all that was appended; False when it has not after the time."""
        return self._writer.wait(timeout_s)

    def close(self) -> None:
        """A stream that nobody needs is removed; one that others send to may hold what was not read."""
        needed = bool(self._room.keys() or self._acknowledged or self._accept)
        self._writer.close(self._retry_s if needed else 1.0)
        if not needed:
            with contextlib.suppress(redis.RedisError):
                self._client.delete(self._stream)
        self._client.close()

    def _remove(self, key: str) -> None:
        """Drop the entry, wherever it is on its way."""
        self._delivered.pop(key, None)
        self._writer.withdraw(key)
        sent = self._writer.sent.pop(self._nonces.pop(key, ""), None)
        if (entry_id := self._ids.pop(key, sent)) is not None:
            self._writer.remove(entry_id)

    # ------------------------------------------------------------------------------------------------- the consumer

    def _take_over(self) -> None:
        """Everything in the stream is ours: what an earlier incarnation has read, and what nobody has."""
        self._make_group()
        start: Any = "0-0"
        while True:
            start, entries, *_ = self._client.xautoclaim(
                self._stream, GROUP, CONSUMER, min_idle_time=0, start_id=start, count=BATCH
            )
            self._index(entries)
            self._delivered.clear()  # there may be much more than is read soon
            if start in (b"0-0", "0-0"):
                break
        while self._deliver():
            self._delivered.clear()
        self._arrived.clear()

    def _refuse_another(self, owner: str) -> None:
        """Two runs would take each other's units. One that was killed has no connection any more."""
        try:
            names = [str(client["name"]) for client in self._client.client_list()]
        except redis.exceptions.NoPermissionError:
            return  # an account that may not look: then it is for the user to know
        if any(name.startswith(owner) and name != owner + self._session for name in names):
            raise PartFailed(
                f"buffer.url: another run uses the stream {self._stream} at {shown(self._url)}; give it a name of its own"
            )

    def _make_group(self) -> None:
        try:
            self._client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _deliver(self, wait_ms: int | None = None) -> bool:
        """Receive entries that were never read; False when there are none."""
        try:
            found = self._client.xreadgroup(GROUP, CONSUMER, {self._stream: ">"}, count=BATCH, block=wait_ms)
        except redis.ResponseError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            self._make_group()  # the server has lost its data: a new group reads what was sent since
            return self._deliver()
        entries = _entries(found)
        self._index(entries)
        return bool(entries)

    def _index(self, entries: Sequence[tuple[bytes, dict[bytes, bytes] | None]]) -> None:
        for entry_id, fields in entries:
            if not fields:  # removed while it was pending
                self._writer.remove(entry_id)
                continue
            entry = Entry.parse(fields)
            known = self._nonces.get(entry.key)
            ours = entry.nonce.startswith(self._session)
            if (known is None and ours) or (known is not None and (known != entry.nonce or entry.key in self._ids)):
                if self._ids.get(entry.key) != entry_id:
                    self.duplicates += 1
                    self._writer.remove(entry_id)
                continue
            if known is None and not self._accept:
                self.refused += 1
                self._writer.remove(entry_id)
                continue
            self._nonces[entry.key], self._ids[entry.key] = entry.nonce, entry_id
            self._writer.sent.pop(entry.nonce, None)
            if entry.key not in self._acknowledged:
                self._delivered[entry.key] = entry.data
            if known is None:
                self._room.fill(entry.key, len(entry.data))
                self._arrived.append(entry.key)

    def _fetch(self, key: str) -> bytes | None:
        """The bytes of a unit that the server has, delivering others on the way."""
        if (entry_id := self._ids.get(key)) is not None:
            found = self._client.xrange(self._stream, min=entry_id, max=entry_id)
            return Entry.parse(found[0][1]).data if found else None
        while key not in self._delivered and self._deliver():
            pass
        return self._delivered.pop(key, None)

    def _patiently(self, ask: Callable[[], T]) -> T:
        deadline, attempt = time.monotonic() + self._retry_s, 0
        while True:
            try:
                return ask()
            except PASSING as error:
                if time.monotonic() > deadline:
                    raise UnitLost(f"the Redis server at {shown(self._url)} is away: {error}") from None
                time.sleep(back_off(attempt))
                attempt += 1


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of the one stream asked for, in the shape of either protocol version of the client."""
    if not found:
        return []
    if isinstance(found, dict):
        (batches,) = found.values()
        return [entry for batch in batches for entry in batch]
    return found[0][1]
