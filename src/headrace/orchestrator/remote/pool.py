"""All actors that were started elsewhere into one engine of the run: requests go on the board, trajectories come back by a stream.

To the dispatcher, the weight sync and the watchdog it is an engine like any other:

    generate   the request is put on the board and waits for a trajectory of its name; who takes it is the actors' matter
    commit     the ticket is put on the board: actors pull, so weights are live once they can be had
    stats      steps of all actors, and which requests are waiting or held

What an actor took and did not bring (it is dead, stopped, or its trajectory was not what it said) is wanted again. A second
answer to a request is counted and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import redis

from headrace.configbase import config_to_dict
from headrace.errors import ConfigError, DataError, PartFailed, StaleTicket, UnitLost
from headrace.exchange.stores.redis import RedisStore
from headrace.exchange.stores.redis_stream import back_off, shown
from headrace.orchestrator.remote import board as boards
from headrace.orchestrator.remote.board import ActorWord, Board, RunNotice
from headrace.orchestrator.remote.trust import flaw
from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import Spaces
from headrace.protocols import PauseMode, RunningPolicy, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.types import NO_VERSION, EngineStats, Event, Trajectory, Unit, WeightTicket

TIDY_S = 0.5
"""So often the board is compared with what is wanted."""
KEPT_S = 1.0
"""An entry is taken out of the stream so long after its trajectory was handed on: by then it is in the buffer's store."""
CHANNELS = {"HttpChannel": "http", "FilesystemChannel": "filesystem"}


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool is built with.

    session: of this incarnation of the run, also for a pool that takes another's place
    resumed: trajectories that an earlier incarnation did not get round to are used
    """

    session: str
    url: str
    run: str
    env: EnvConfig
    policy: PolicyConfig
    seed: int
    step_timeout_s: float
    wait_s: float
    resumed: bool


def build_pool(context: WorkerContext, plan: PoolPlan, channel: Any, say: Callable[[str], None]) -> ActorPool:
    return ActorPool(context, plan, channel, say)


class ActorPool:
    """An `ActionEngine`'s outer face over a board. Two threads talk to the server, so that the loop never waits for it."""

    def __init__(self, context: WorkerContext, plan: PoolPlan, channel: Any, say: Callable[[str], None]) -> None:
        self.plan, self.say, self._record = plan, say, context.record
        self.refused = self.late = 0
        self._notice = RunNotice(
            session=plan.session,
            seed=plan.seed,
            env=config_to_dict(plan.env),
            policy=config_to_dict(plan.policy),
            channel=CHANNELS[type(channel).__name__],
            settings=channel.settings(),
            step_timeout_s=plan.step_timeout_s,
        )
        self._ticket: WeightTicket | None = None
        self._spaces: Spaces | None = None
        self._waiting: dict[str, asyncio.Future[Trajectory]] = {}
        self._handed_on: dict[str, float] = {}
        self._leftovers: deque[tuple[str, Unit]] = deque()
        self._actors: dict[str, ActorWord] = {}
        self._on_board: set[str] = set()
        self._steps, self._steps_of_gone = 0, 0
        self._missing: set[str] = set()
        self._away = False
        self._told: set[str] = set()
        self._broken = ""
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._board = Board(plan.url, plan.run)
        self._store = self._open()
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[str] = queue.SimpleQueue()  # keys to take out of the stream
        self._threads = [
            threading.Thread(target=self._until_it_breaks, args=(work,), name=name, daemon=True)
            for name, work in (("actors-board", self._keep_board), ("actors-stream", self._read_stream))
        ]
        for thread in self._threads:
            thread.start()

    def _open(self) -> RedisStore:
        """Take the board over. What an earlier run of this name left is thrown away, or used."""
        board, plan = self._board, self.plan
        deadline = time.monotonic() + boards.GONE_S + 1.0
        try:
            while board.other_learner(self._notice.session):  # one that was killed a moment ago is still named
                if time.monotonic() > deadline:
                    raise ConfigError(
                        "name",
                        f'found "{plan.run}", under which another run has actors at {shown(plan.url)}; choose another',
                    )
                time.sleep(0.2)
            store = RedisStore(plan.url, board.stream, keep_acknowledged=False, accept=True)
            board.unwant(board.wanted())
            if not plan.resumed:
                board.forget_spaces()
            board.announce(self._notice, None)
        except redis.RedisError as error:
            raise PartFailed(f"buffer.url: no Redis server answers at {shown(plan.url)} ({error})") from None
        for key in store.scan():
            unit = _read(store, key) if plan.resumed else None
            if unit is not None:
                self._leftovers.append((key, unit))
            else:
                store.acknowledge(key)
        return store

    # ------------------------------------------------------------------------------------------------- as an engine

    async def describe(self) -> Spaces:
        """What the environments show and take, once an actor has said it. Raises `PartFailed` when none comes."""
        where = f"headrace actor {shown(self.plan.url)} --run {self.plan.run}"
        self.say(f"waits for actors; start as many as you like, anywhere: {where}")
        deadline = self._loop.time() + self.plan.wait_s
        while self._spaces is None:
            if self._loop.time() > deadline:
                raise PartFailed(f"no actor came within {self.plan.wait_s:g} s; start some with: {where}")
            await asyncio.sleep(0.05)
        return self._spaces

    async def generate(self, request: TrajectoryRequest) -> Trajectory:
        while self._leftovers:
            key, unit = self._leftovers.popleft()
            if not (problem := self._flaw(unit)):
                return self._hand_on(key, unit, request)  # type: ignore[arg-type]
            self._refuse(problem)
            self._read.put(key)
        name = request.request_id
        self._waiting[name] = future = self._loop.create_future()
        self._errands.put(lambda: self._board.want([name]))
        try:
            key, unit = await future
        finally:
            self._waiting.pop(name, None)
        return self._hand_on(key, unit, request)

    async def abort(self, request_id: str, keep_kv: bool = False) -> None:
        """Half a trajectory is none, so nothing is handed back."""
        if (future := self._waiting.pop(request_id, None)) is not None and not future.done():
            future.set_exception(PartFailed(f"{request_id} was aborted"))
            self._errands.put(lambda: self._board.unwant([request_id]))

    async def prepare(self, ticket: WeightTicket) -> None:
        """The bytes lie where the trainer has put them until an actor comes for them."""

    async def commit(self, ticket: WeightTicket, running: RunningPolicy = "go_on") -> None:
        """A trajectory that is under way ends with the weights that it began with."""
        live = self._ticket.version if self._ticket is not None else NO_VERSION
        if ticket.version < live:
            raise StaleTicket(f"version {ticket.version} is below {live}, the live one")
        self._ticket = ticket
        self._errands.put(self._announce)

    async def pause(self, mode: PauseMode) -> None:
        """Who starts what is the dispatcher's matter; actors are asked for nothing in between."""

    async def resume(self) -> None:
        """See `pause`."""

    async def sleep(self, level: int) -> None:
        """Actors have memory of their own."""

    async def wake(self) -> None:
        """See `sleep`."""

    async def stats(self) -> EngineStats:
        """`paused` while nobody is there to do anything: that is no fault of the pool."""
        if self._broken:
            raise PartFailed(self._broken)
        names = list(self._waiting)
        waiting = sum(name in self._on_board for name in names)
        return EngineStats(
            version=self._ticket.version if self._ticket is not None else NO_VERSION,
            running=len(names) - waiting,
            waiting=waiting,
            paused=not self._actors or self._away,
            progress=dict.fromkeys(names, 0),
            generated_tokens=self._steps,
        )

    @property
    def ignored(self) -> int:
        """Answers to requests that had one."""
        return self.late + self._store.duplicates

    async def close(self) -> None:
        """Leave the board as it is, for a pool that takes this one's place; the run's end is `end_board`."""
        if self.refused or self.ignored:
            self.say(f"actors: {self.refused} trajectories were refused, {self.ignored} came a second time or too late")
        self._closing = True
        self._errands.put(lambda: None)
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(10.0)
        with contextlib.suppress(redis.RedisError):  # a run of a second may not have looked round yet
            self._note_actors(self._board.actors())
        for key in list(self._handed_on):
            self._store.acknowledge(key)
        self._store.close()
        self._board.close()

    # ----------------------------------------------------------------------------------------------- trajectories

    def _hand_on(self, key: str, unit: Trajectory, request: TrajectoryRequest) -> Trajectory:
        self._handed_on[key] = time.monotonic()
        return dataclasses.replace(unit, sample_id=request.key.lease_id)

    def _arrived(self, key: str, unit: Unit) -> None:
        if (future := self._waiting.get(key)) is not None and not future.done():
            future.set_result((key, unit))
        else:
            self.late += 1
            self._read.put(key)

    def _flaw(self, unit: Unit) -> str:
        if self._spaces is None:
            return "nobody has said yet what the environments are"
        env, policy = self.plan.env, self.plan.policy
        memory = dict.fromkeys({"none": "", "gru": "h", "lstm": "hc"}[policy.recurrent], policy.recurrent_size)
        newest = self._ticket.version if self._ticket is not None else NO_VERSION
        return flaw(unit, self._spaces, env.steps, env.count, newest, memory)

    def _refuse(self, problem: str) -> None:
        self.refused += 1
        self._tell(f"a trajectory was refused: {problem}")

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            self.say(text)

    # ---------------------------------------------------------------------------------------------------- threads

    def _until_it_breaks(self, work: Callable[[], None]) -> None:
        """A thread that ends before its pool is said by the next `stats`, for which a pool is replaced."""
        try:
            work()
        except Exception as error:
            self._broken = f"{threading.current_thread().name}: {type(error).__name__}: {error}"

    def _read_stream(self) -> None:
        while not self._closing:
            try:
                while not self._read.empty():
                    self._store.acknowledge(self._read.get())
                arrived = self._store.arrivals(0.2)
            except (UnitLost, redis.RedisError):  # the server is away, or has something else under our name
                time.sleep(TIDY_S)
                continue
            for key in arrived:
                unit = _read(self._store, key)
                if problem := "it is no unit at all" if unit is None else self._flaw(unit):
                    self._store.acknowledge(key)  # at once: the name is free for the true answer
                    self._loop.call_soon_threadsafe(self._refuse, problem)
                else:
                    self._loop.call_soon_threadsafe(self._arrived, key, unit)

    def _keep_board(self) -> None:
        tidied, attempt = 0.0, 0
        while not self._closing:
            try:
                self._errands.get(timeout=TIDY_S)()
            except queue.Empty:
                pass
            except redis.RedisError:
                pass  # the next tidying makes up for it
            if time.monotonic() - tidied < TIDY_S:
                continue
            try:
                self._tidy()
                attempt = 0
                self._note_away(None)
            except redis.RedisError as error:
                self._note_away(error)
                time.sleep(back_off(attempt))
                attempt += 1
            except DataError as error:
                self._loop.call_soon_threadsafe(self._tell, str(error))
            tidied = time.monotonic()

    def _announce(self) -> None:
        self._board.announce(self._notice, self._ticket)

    def _tidy(self) -> None:
        """Make the board say what is so: a server that restarted may have lost all of it."""
        board = self._board
        self._announce()
        if self._spaces is None:
            self._spaces = board.spaces()
        elif board.spaces() is None:
            board.show_spaces(self._spaces)
        actors = board.actors()
        self._note_actors(actors)
        wanted = board.wanted()
        held = board.held(list(actors))  # after `wanted`: what is taken in between is seen twice, and never missed
        waiting = list(self._waiting)
        missing = set(waiting) - set(wanted) - set(held)
        again = [name for name in waiting if name in missing & self._missing]
        board.want(again)
        board.unwant([name for name in wanted if name not in self._waiting])
        self._missing = missing - set(again)
        self._on_board = set(wanted)
        now = time.monotonic()
        for key in [key for key, since in list(self._handed_on.items()) if now - since > KEPT_S]:
            del self._handed_on[key]
            self._read.put(key)

    def _note_actors(self, actors: dict[str, ActorWord]) -> None:
        before, self._actors = self._actors, actors
        self._steps_of_gone += sum(word.steps for name, word in before.items() if name not in actors)
        self._steps = self._steps_of_gone + sum(word.steps for word in actors.values())
        for name, word in actors.items():
            worked_ns = int(1e9 * (word.busy_s - before[name].busy_s)) if name in before else 0
            if worked_ns > 0:  # in one piece that ends now: its clock is another machine's
                began_ns = time.monotonic_ns() - worked_ns
                event = Event(began_ns, f"engine-{name}", "generate", "", word.version, worked_ns)
                self._loop.call_soon_threadsafe(self._record, event)
        for name in [*actors, *before]:
            if (name in actors) != (name in before):
                word = (actors | before)[name]
                what = "is here" if name in actors else "is gone"
                count = f"{len(actors)} in all" if actors else "none is left, and the run waits for one"
                self._say_soon(f"actor {name} ({word.host}, pid {word.pid}) {what}; {count}")

    def _note_away(self, error: Exception | None) -> None:
        if self._away != (error is not None):
            self._away = error is not None
            self._say_soon(
                f"the Redis server at {shown(self.plan.url)} is away: {error}" if error else "the Redis server is back"
            )

    def _say_soon(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self.say, text)


def end_board(plan: PoolPlan) -> None:
    """Tell the actors that the run is over."""
    board = Board(plan.url, plan.run)
    try:
        if not board.other_learner(plan.session):
            board.end()
    except redis.RedisError:
        pass  # a server that is away has nobody on it
    finally:
        board.close()


def _read(store: RedisStore, key: str) -> Unit | None:
    try:
        return store.read(key)
    except UnitLost:
        return None
