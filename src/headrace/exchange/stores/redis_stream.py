"""Units into entries of a Redis stream, from a thread that outlasts the server's restarts, or from an actor elsewhere."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.errors import CallTimeout, MissingExtra, PartFailed
from headrace.exchange.codec import encode
from headrace.types import Unit

try:
    import redis
except ImportError:  # pragma: no cover - the test environment has it
    raise MissingExtra("redis", "redis", 'buffer.store = "redis"') from None

GROUP, CONSUMER = "trainer", "controller"
BATCH = 64
PASSING = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.OutOfMemoryError)
"""A server that restarts (BusyLoadingError is a ConnectionError), is away, or is full for the moment."""
_BACKOFF_S = (0.01, 0.05, 0.2, 0.5)


def connect(url: str, timeout_s: float = 5.0, name: str | None = None) -> redis.Redis:
    """A client that raises at once when the server is away: who calls knows whether to wait. name: shown by CLIENT LIST"""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            client_name=name,
        )
    except ValueError as error:
        raise PartFailed(f"buffer.url: {shown(url)!r} is not the address of a Redis server ({error})") from None


def shown(url: str) -> str:
    """The address for people, without its password."""
    place = urlsplit(url)
    return url.replace(f":{place.password}@", ":***@") if place.password else url


def back_off(attempt: int) -> float:
    """Seconds to wait before the next try."""
    return _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]


@dataclass(frozen=True, slots=True)
class Entry:
    """One unit on the wire. `nonce` tells two sendings of one key apart from one that came twice."""

    key: str
    nonce: str
    data: bytes

    def fields(self) -> dict[str, str | bytes]:
        return {"key": self.key, "nonce": self.nonce, "unit": self.data}

    @classmethod
    def parse(cls, fields: dict[bytes, bytes]) -> Entry:
        """Whatever the fields hold: a stranger may have written them."""
        text = [fields.get(name, b"").decode(errors="replace") for name in (b"key", b"nonce")]
        return cls(*text, fields.get(b"unit", b""))


class StreamWriter:
    """Sends entries and removals in order, from a thread; what the server did not confirm is sent again."""

    def __init__(self, url: str, stream: str) -> None:
        self._client, self._stream = connect(url), stream
        self._changed = threading.Condition()
        self._queue: deque[Entry | bytes] = deque()
        self._pending: dict[str, Entry] = {}
        self.sent: dict[str, bytes] = {}
        """Nonce -> entry id of what the server confirmed; who learns of the entry in another way takes it out."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-redis", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Entries that the server does not have yet."""
        return len(self._pending)

    def pending(self, key: str) -> bytes | None:
        entry = self._pending.get(key)
        return entry.data if entry is not None else None

    def add(self, entry: Entry) -> None:
        with self._changed:
            self._pending[entry.key] = entry
            self._queue.append(entry)
            self._changed.notify_all()

    def remove(self, entry_id: bytes) -> None:
        with self._changed:
            self._queue.append(entry_id)
            self._changed.notify_all()

    def withdraw(self, key: str) -> None:
        """Do not send what was not sent yet."""
        with self._changed:
            if (entry := self._pending.pop(key, None)) is not None:
                with contextlib.suppress(ValueError):
                    self._queue.remove(entry)

    def wait(self, timeout_s: float) -> bool:
        """Until the server has everything; False when it has not after the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self, timeout_s: float) -> None:
        self.wait(timeout_s)
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        attempt = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                batch = [self._queue[i] for i in range(min(BATCH, len(self._queue)))]
            try:
                ids = self._send(batch)
                attempt = 0
            except redis.RedisError:
                # Not a word of the batch counts as done: the reader removes what comes twice.
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, back_off(attempt))
                attempt += 1
                continue
            with self._changed:
                for item, entry_id in zip(batch, ids, strict=True):
                    if self._queue and self._queue[0] is item:
                        self._queue.popleft()
                    if isinstance(item, bytes):
                        continue
                    if self._pending.get(item.key) is item:
                        del self._pending[item.key]
                        self.sent[item.nonce] = entry_id
                    else:  # withdrawn while it was on its way
                        self._queue.append(entry_id)
                self._changed.notify_all()

    def _send(self, batch: list[Entry | bytes]) -> list[bytes]:
        """Each item's entry id."""
        pipe = self._client.pipeline(transaction=False)
        for item in batch:
            if isinstance(item, Entry):
                pipe.xadd(self._stream, item.fields())
            else:
                pipe.xack(self._stream, GROUP, item)
                pipe.xdel(self._stream, item)
        answers = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and "NOGROUP" not in str(answer):
                raise answer
        ids, replies = [], iter(answers)
        for item in batch:
            reply = next(replies)
            if isinstance(item, bytes):
                next(replies)  # a removal has two
            ids.append(reply if isinstance(item, Entry) else item)
        return ids


class RedisSender:
    """For an actor that knows only an address. Sends units to the stream of a run, and waits while it is full.

    max_entries: so many units may be in the stream before a sender waits
    """

    def __init__(self, url: str, stream: str, max_entries: int = 256) -> None:
        self._client, self._stream, self._max = connect(url), stream, max_entries

    def send(self, key: str, unit: Unit, timeout_s: float = 60.0) -> None:
        """Return once the server has it. The same key may be sent again: the reader keeps one. Raises `CallTimeout`."""
        entry = Entry(key, secrets.token_hex(8), encode(unit))
        deadline, attempt = time.monotonic() + timeout_s, 0
        while True:
            try:
                if self._client.xlen(self._stream) < self._max:
                    self._client.xadd(self._stream, entry.fields())
                    return
                problem = f"the stream holds {self._max} units that nobody has taken"
            except PASSING as error:
                problem = str(error)
            if time.monotonic() > deadline:
                raise CallTimeout(f"unit {key} could not be sent within {timeout_s:g} s: {problem}")
            time.sleep(back_off(attempt))
            attempt += 1

    def close(self) -> None:
        self._client.close()
