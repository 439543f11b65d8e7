"""What a learner and its actors tell each other through a Redis server, as one key each.

    headrace:actors                 the runs on this server, by name
    headrace:actors:RUN:run         what the run is: environment, policy, seed, weight channel          learner
    headrace:actors:RUN:learner     its session; expires when the learner is gone                       learner
    headrace:actors:RUN:ticket      the newest weights                                                  learner
    headrace:actors:RUN:wanted      trajectories that are wanted, the oldest request first              learner, actors take
    headrace:actors:RUN:spaces      what the environments show and take                                 the first actor
    headrace:actors:RUN:actors      their IDs                                                           actors
    headrace:actors:RUN:held:ID     requests that actor ID works on                                     actor
    headrace:actors:RUN:actor:ID    what actor ID says of itself; expires when it is gone               actor
    headrace:actors:RUN:units       the stream of trajectories                                          actors, learner takes
    headrace:actors:RUN:over        the run has ended; expires, too                                     learner

Everything is JSON or msgpack against declared types: what is read is data and nothing else. All of it can be
lost (a server that restarts without its data): whoever wrote a key writes it again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from headrace.errors import CallTimeout, DataError
from headrace.exchange.stores.redis_stream import PASSING, back_off, connect, shown
from headrace.policies.spaces import Spaces
from headrace.types import WeightTicket

T = TypeVar("T")

ROOT = "headrace:actors"
GONE_S = 5
"""Who has not been heard of for so long is taken for dead."""
OVER_S = 3600


class RunNotice(msgspec.Struct, frozen=True, kw_only=True):
    """session: one incarnation of one run; env, policy: tables of its config; channel, settings: where weights are read;
    step_timeout_s: an actor whose environments stand still for longer gives itself up."""

    session: str
    seed: int
    env: dict[str, Any]
    policy: dict[str, Any]
    channel: str
    settings: dict[str, Any]
    step_timeout_s: float


class TicketNotice(msgspec.Struct, frozen=True):
    session: str
    ticket: WeightTicket


class ActorWord(msgspec.Struct, frozen=True, kw_only=True):
    """Since it was started: environment steps, and seconds that they took; version: of the weights that it acts with."""

    host: str
    pid: int
    steps: int
    busy_s: float
    version: int


class Board:
    """One run's keys, from either side. Every call is a few round trips, and raises `redis.RedisError` at once when the server
    is away; `patiently` waits for it."""

    def __init__(self, url: str, run: str, timeout_s: float = 5.0) -> None:
        self.url, self.run = url, run
        self.client = connect(url, timeout_s)
        self.stream = self._key("units")

    def _key(self, *parts: str) -> str:
        return _key(self.run, *parts)

    def close(self) -> None:
        self.client.close()

    def patiently(self, ask: Callable[[], T], seconds: float) -> T:
        """The answer, once the server is there. Raises `CallTimeout`."""
        deadline, attempt = time.monotonic() + seconds, 0
        while True:
            try:
                return ask()
            except PASSING as error:
                if time.monotonic() > deadline:
                    raise CallTimeout(
                        f"no Redis server answers at {shown(self.url)} since {seconds:g} s ({error})"
                    ) from None
                time.sleep(back_off(attempt))
                attempt += 1

    # ------------------------------------------------------------------------------------------------- the learner

    def other_learner(self, session: str) -> bool:
        """Whether another run of this name uses the server."""
        found = self.client.get(self._key("learner"))
        return found is not None and found != session.encode()

    def announce(self, notice: RunNotice, ticket: WeightTicket | None) -> None:
        """Say that the learner is there, and everything that an actor has to know. An older incarnation's weights go."""
        pipe = self.client.pipeline(transaction=True)
        pipe.sadd(ROOT, self.run)
        pipe.delete(self._key("over"))
        pipe.set(self._key("run"), msgspec.json.encode(notice))
        pipe.set(self._key("learner"), notice.session, ex=GONE_S)
        if ticket is None:
            pipe.delete(self._key("ticket"))
        else:
            pipe.set(self._key("ticket"), msgspec.json.encode(TicketNotice(notice.session, ticket)))
        pipe.execute()

    def end(self) -> None:
        """The run is over: nothing of it stays but that, for a while."""
        self.client.srem(ROOT, self.run)
        for name in self.client.smembers(self._key("actors")):
            self._forget(name.decode(errors="replace"))
        parts = ("run", "learner", "ticket", "wanted", "spaces", "number", "units", "actors")
        self.client.delete(*(self._key(part) for part in parts))
        self.client.set(self._key("over"), "1", ex=OVER_S)

    def want(self, requests: Sequence[str]) -> None:
        if requests:
            self.client.rpush(self._key("wanted"), *requests)

    def unwant(self, requests: Sequence[str]) -> None:
        for request in requests:
            self.client.lrem(self._key("wanted"), 0, request)

    def wanted(self) -> list[str]:
        return [item.decode(errors="replace") for item in self.client.lrange(self._key("wanted"), 0, -1)]

    def actors(self) -> dict[str, ActorWord]:
        """Those that are there. What others held is free for everybody."""
        names = sorted(name.decode(errors="replace") for name in self.client.smembers(self._key("actors")))
        found = {}
        for name, data in zip(
            names, self.client.mget([self._key("actor", n) for n in names]) if names else [], strict=True
        ):
            try:
                found[name] = msgspec.json.decode(data or b"", type=ActorWord)
            except msgspec.MsgspecError:  # it has expired, or whoever wrote it is no actor
                self._forget(name)
        return found

    def _forget(self, actor: str) -> None:
        self.client.srem(self._key("actors"), actor)
        self.client.delete(self._key("held", actor), self._key("actor", actor))

    def held(self, actors: Sequence[str]) -> list[str]:
        """Requests that these actors work on."""
        lists = [self.client.lrange(self._key("held", actor), 0, -1) for actor in actors]
        return [item.decode(errors="replace") for items in lists for item in items]

    def spaces(self) -> Spaces | None:
        """What the first actor has found. Raises `DataError` for what is none."""
        data = self.client.get(self._key("spaces"))
        try:
            found = msgspec.msgpack.decode(data, type=Spaces) if data is not None else None
            for leaf in found.leaves if found is not None else ():
                if np.dtype(leaf.dtype).kind not in "biuf":
                    raise ValueError(f"{leaf.name} is {leaf.dtype}")
            return found
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise DataError(
                f"{self._key('spaces')} at {shown(self.url)} does not describe environments: {error}"
            ) from None

    def forget_spaces(self) -> None:
        self.client.delete(self._key("spaces"))

    # ------------------------------------------------------------------------------------------------------ actors

    def notice(self) -> RunNotice | None:
        """The run, if its learner is there."""
        data, learner = self.client.mget(self._key("run"), self._key("learner"))
        return _decoded(data, RunNotice, self._key("run")) if data is not None and learner is not None else None

    def over(self) -> bool:
        """Whether the run has come to its end. A learner that died has not said so, and may come back."""
        return bool(self.client.exists(self._key("over")))

    def ticket(self) -> TicketNotice | None:
        data = self.client.get(self._key("ticket"))
        return _decoded(data, TicketNotice, self._key("ticket")) if data is not None else None

    def number(self) -> int:
        """One that no other actor of the run has had."""
        return int(self.client.incr(self._key("number")))

    def show_spaces(self, spaces: Spaces) -> Spaces:
        """Say what the environments here show and take, unless another actor has; what is agreed on."""
        self.client.set(self._key("spaces"), msgspec.msgpack.encode(spaces), nx=True)
        return self.spaces() or spaces

    def here(self, actor: str, word: ActorWord) -> None:
        pipe = self.client.pipeline(transaction=True)
        pipe.sadd(self._key("actors"), actor)
        pipe.set(self._key("actor", actor), msgspec.json.encode(word), ex=GONE_S)
        pipe.execute()

    def take(self, actor: str, wait_s: float) -> str | None:
        """The oldest request, which this actor holds from now on."""
        found = self.client.blmove(self._key("wanted"), self._key("held", actor), wait_s, "LEFT", "RIGHT")
        return found.decode(errors="replace") if found is not None else None

    def done(self, actor: str, request: str) -> None:
        self.client.lrem(self._key("held", actor), 0, request)

    def leave(self, actor: str) -> None:
        """Hand back what was not done."""
        while self.client.lmove(self._key("held", actor), self._key("wanted"), "RIGHT", "LEFT") is not None:
            continue
        self._forget(actor)


def _key(run: str, *parts: str) -> str:
    return ":".join((ROOT, quote(run, safe=""), *parts))


def runs_at(url: str) -> list[str]:
    """Names of the runs that want actors on a server; those whose learner is away only when there is no other."""
    client = connect(url)
    try:
        names = sorted(name.decode(errors="replace") for name in client.smembers(ROOT))
        there = [name for name in names if client.exists(_key(name, "learner"))]
        return there or names
    finally:
        client.close()


def word_of(steps: int, busy_s: float, version: int) -> ActorWord:
    return ActorWord(host=socket.gethostname(), pid=os.getpid(), steps=steps, busy_s=busy_s, version=version)


def _decoded(data: bytes, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"{key} is not what it should be: {error}") from None
