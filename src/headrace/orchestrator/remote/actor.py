"""The address of a Redis server into an actor: it learns there what to step, takes requests, pulls weights, sends trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis

from headrace.configbase import build
from headrace.errors import CallTimeout, ConfigError, DataError, PartFailed, RunError, StaleTicket, UserError
from headrace.exchange.stores.redis_stream import RedisSender, shown
from headrace.orchestrator.remote.board import Board, RunNotice, runs_at, word_of
from headrace.policies.config import PolicyConfig
from headrace.protocols import Resources, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.types import RequestKey

BEAT_S = 1.0
TAKE_S = 1.0
HARMLESS = ("sim:", "envpool:")
"""Beginnings of environment names that have a colon and import nothing of a user's."""


class NewSession(Exception):
    """The learner has been started anew: everything is asked again."""


def run_actor(url: str, run: str, allowed: Sequence[str], patience_s: float, tell: Callable[[str], None]) -> int:
    """Work until the run is over (0). Raises `RunError` when its server or learner is away for longer than `patience_s`."""
    if urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        raise UserError(f"{shown(url)!r} is not the address of a Redis server; give redis://HOST:PORT/DB")
    board = Board(url, run or _only_run(url, patience_s))
    try:
        while True:
            notice = _notice(board, patience_s, tell)
            if notice is None:
                tell(f"run {board.run} is over")
                return 0
            try:
                asyncio.run(RemoteActor(board, notice, allowed, patience_s, tell).work())
            except NewSession:
                tell(f"run {board.run} was started anew")
    except CallTimeout as error:
        raise RunError(str(error)) from None
    except redis.RedisError as error:  # not one that passes
        raise RunError(f"the Redis server at {shown(url)} answers: {error}") from None
    finally:
        board.close()


def _only_run(url: str, patience_s: float) -> str:
    """The name of the run that wants actors, when there is one alone."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            names = runs_at(url)
        except redis.RedisError as error:
            if time.monotonic() > deadline:
                raise RunError(f"no Redis server answers at {shown(url)} ({error})") from None
            names = []
        if len(names) == 1:
            return names[0]
        if names:
            raise UserError(f"several runs want actors at {shown(url)}: {', '.join(names)}; choose one with --run")
        if time.monotonic() > deadline:
            raise RunError(f'no run wants actors at {shown(url)}; start one with rollout.source="redis"')
        time.sleep(0.2)


def _notice(board: Board, patience_s: float, tell: Callable[[str], None]) -> RunNotice | None:
    """The run, once its learner is there; None when it is over."""
    deadline, told = time.monotonic() + patience_s, False
    while (notice := board.patiently(board.notice, patience_s)) is None:
        if board.patiently(board.over, patience_s):
            return None
        if time.monotonic() > deadline:
            raise CallTimeout(f"the learner of run {board.run} at {shown(board.url)} is away since {patience_s:g} s")
        if not told:
            told = True
            tell(f"waits for the learner of run {board.run}")
        time.sleep(0.2)
    return notice


class RemoteActor:
    """One session's work. Weights are looked for before each trajectory."""

    def __init__(
        self, board: Board, notice: RunNotice, allowed: Sequence[str], patience_s: float, tell: Callable[[str], None]
    ) -> None:
        self.board, self.notice, self.patience_s, self.tell = board, notice, patience_s, tell
        self.id = secrets.token_hex(4)
        env, policy = build(EnvConfig, notice.env, "env"), build(PolicyConfig, notice.policy, "policy")
        _refuse_imports({"env.id": env.id, "policy.network": policy.network}, allowed)
        from headrace.rollout.control_rollout import Actor

        self.number = board.patiently(board.number, patience_s)
        context = WorkerContext(name=f"engine-{self.number}", record=lambda event: None, resources=Resources())
        self.channel = _channel(notice)
        self.actor = Actor(context, env, policy, self.channel, notice.seed)
        self.sender = RedisSender(board.url, board.stream)
        self.ended = threading.Event()
        self.moved = (0, time.monotonic())
        self.busy, self.busy_s = False, 0.0

    async def work(self) -> None:
        spaces = self.board.patiently(lambda: self.board.show_spaces(self.actor.engine.spaces), self.patience_s)
        if spaces != self.actor.engine.spaces:
            raise ConfigError(
                "env.id", f"{self.notice.env['id']} shows or takes something else here than at the run's other actors"
            )
        self.board.patiently(lambda: self._here(self.board), self.patience_s)
        beat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beat.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
        try:
            self.tell(f"actor {self.id} acts for run {self.board.run} (number {self.number}, pid {os.getpid()})")
            while await self._newest_weights():
                name = self.board.patiently(lambda: self.board.take(self.id, TAKE_S), self.patience_s)
                if name is not None:
                    await self._answer(name)
                elif (notice := _notice(self.board, self.patience_s, self.tell)) is None:
                    break
                elif notice.session != self.notice.session:
                    raise NewSession
                await asyncio.sleep(0)  # a Ctrl-C cancels here
        finally:
            self.ended.set()
            beat.join()
            with contextlib.suppress(redis.RedisError):  # the learner sees by itself that this actor is gone
                self.board.leave(self.id)
            self.sender.close()
            self.channel.close()
            await self.actor.close()

    async def _answer(self, name: str) -> None:
        began = time.monotonic()
        self.moved, self.busy = (self.actor._steps, began), True
        try:
            trajectory = await self.actor.generate(TrajectoryRequest(key=RequestKey(lease_id=name)))
        except PartFailed as error:  # the request stays wanted; the environments are made anew for the next one
            self.tell(str(error).partition("\n")[0])
            await asyncio.sleep(0.1)
        else:
            self.busy_s += time.monotonic() - began
            self.sender.send(name, trajectory, self.patience_s)
        finally:
            self.busy = False
        self.board.patiently(lambda: self.board.done(self.id, name), self.patience_s)

    async def _newest_weights(self) -> bool:
        """Run the newest weights; go on with older ones when they cannot be had. False when the run is over."""
        deadline, told = time.monotonic() + self.patience_s, ""
        while True:
            found = self.board.patiently(self.board.ticket, self.patience_s)
            engine = self.actor.engine
            problem = "it has published none"
            if found is not None and found.session == self.notice.session:
                if found.ticket.version <= engine.version:
                    return True
                try:
                    await self.actor.prepare(found.ticket)
                    await self.actor.commit(found.ticket)
                    return True
                except StaleTicket:  # a newer version has taken its place meanwhile
                    problem = "they change faster than they can be read"
                except PartFailed as error:
                    problem = str(error).partition("\n")[0]
                if engine.version >= 0:
                    return True
                if not told:
                    told = problem
                    self.tell(f"no weights yet: {problem}")
            if (notice := _notice(self.board, self.patience_s, self.tell)) is None:
                return False
            if notice.session != self.notice.session:
                raise NewSession
            if time.monotonic() > deadline:
                raise CallTimeout(f"no weights of run {self.board.run}: {problem}")
            await asyncio.sleep(0.1)

    def _here(self, board: Board) -> None:
        board.here(self.id, word_of(self.actor._steps, self.busy_s, self.actor.engine.version))

    def _beat(self) -> None:
        """Say that this actor is here, unless its environments stand still: then it gives itself up."""
        board = Board(self.board.url, self.board.run)
        while not self.ended.wait(BEAT_S):
            steps = self.actor._steps
            if steps != self.moved[0] or not self.busy:
                self.moved = (steps, time.monotonic())
            elif time.monotonic() - self.moved[1] > self.notice.step_timeout_s:
                print(
                    f"headrace: {self.notice.env['id']} has made no step for {self.notice.step_timeout_s:g} s; "
                    "this actor gives up",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            try:
                self._here(board)
            except redis.RedisError:
                continue  # the main loop says so when it lasts
        board.close()


def _refuse_imports(named: dict[str, str], allowed: Sequence[str]) -> None:
    """A server may name what is installed here as data; what has to be imported is for this command line to say."""
    for path, name in named.items():
        if ":" in name and not name.startswith(HARMLESS) and name not in allowed:
            raise ConfigError(
                path,
                f'the run asks for "{name}", which is code to be imported here; if you trust it, add --allow {name}',
            )


def _channel(notice: RunNotice) -> Any:
    """This end of the weight channel."""
    match notice.channel:
        case "http":
            from headrace.exchange.channels.http import HttpChannel as Channel
        case "filesystem":
            from headrace.exchange.channels.filesystem import FilesystemChannel as Channel  # type: ignore[assignment]
        case other:
            raise ConfigError("weights.channel", f'found "{other}", which an actor elsewhere cannot read')
    try:
        return Channel(**notice.settings)
    except TypeError:
        raise DataError(f"what the run says of its weight channel is not right: {sorted(notice.settings)}") from None
