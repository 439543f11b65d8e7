"""Turns leases into scored groups that outside clients produce: every member of a group is a session of some client.

A lease is admitted as ever and offers `group.size` places. A client opens a session, which takes a place and is given the
lease's task; it talks to the model as often as it likes; the score that it posts closes the session. The group closes when
all its places are done, or at `group.timeout_s` after its first session was opened. A session of which nothing is heard for
`clients.idle_s` ends, and its place is free again, `group.retries` times.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from headrace.errors import RolloutDropped
from headrace.protocols import Lease, RewardRequest
from headrace.rollout.clients.dialogue import Dialogue
from headrace.rollout.clients.wire import ApiError, PostScore
from headrace.rollout.engines.sequences import join_generations
from headrace.rollout.partial import MemberProgress
from headrace.rollout.token_rollout import TokenRollout, member_seed
from headrace.signals import Signal
from headrace.types import Episode, GenerateRequest, Generation, Group, SamplingParams, Score, Task

T = TypeVar("T")

REMEMBERED = 10_000
"""Ended sessions of which it is still known how they ended."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's attempt at a task.

    key: the secret that speaks for this session alone
    heard_at: when its last request ended (seconds of the loop's clock)
    ended: why, once it has; score: what it was closed with
    """

    name: str
    key: str
    board: Board
    index: int
    dialogue: Dialogue
    heard_at: float
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    ended: str = ""
    posted: PostScore | None = None
    score: Score | None = None

    @property
    def task(self) -> Task:
        return self.board.lease.task


@dataclass(slots=True, eq=False)
class Board:
    """The places of one lease. turns: requests so far by place, over all its sessions; began: on the clock of `open_time`."""

    lease: Lease
    group: str | None = None
    began: float | None = None
    open: dict[int, Session] = field(default_factory=dict)
    done: dict[int, MemberProgress] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)


class ClientRollout(TokenRollout):
    """A rollout function whose episodes come from clients; what the HTTP server calls.

    ends: end token id -> its text
    """

    def __init__(self, *args: Any, idle_s: float, ends: dict[int, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle_s, self.ends = idle_s, ends
        self.boards: dict[str, Board] = {}
        self.sessions: dict[str, Session] = {}
        self.ended: OrderedDict[str, Session] = OrderedDict()
        self.keys: dict[str, Session] = {}
        self.changed = Signal()
        self.plain_requests = 0

    # ------------------------------------------------------------------------------------------------- the group

    async def __call__(self, lease: Lease) -> Group:
        board = self.boards[lease.lease_id] = Board(lease)
        self.changed.fire()
        why = "its group is closed"
        try:
            await self._until_closed(board)
        except asyncio.CancelledError:
            why = "the run gave its group up"
            raise
        finally:
            del self.boards[lease.lease_id]
            for session in list(board.open.values()):
                self._end(session, why)
        if len(board.done) < self.min_complete:
            raise RolloutDropped(*self._reason(board))
        return await self._close(lease, dict(sorted(board.done.items())))

    async def _until_closed(self, board: Board) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._end_idle(board, clock())
            failed = sum(len(reasons) > self.group.retries for reasons in board.failures.values())
            if len(board.done) + failed >= self.group.size or self.group.size - failed < self.min_complete:
                return
            waits = [
                session.heard_at + self.idle_s - clock() for session in board.open.values() if not session.requests
            ]
            if board.began is not None:
                waits.append(board.began + self.group.timeout_s - self.open_time())
                if waits[-1] <= 1e-6:
                    return
            await self.changed.wait(max(min(waits), 1e-3) if waits else None)

    def _end_idle(self, board: Board, now: float) -> None:
        for session in list(board.open.values()):
            if not session.requests and now - session.heard_at >= self.idle_s:
                self._fail(session, "idle", f"nothing was heard of it for {self.idle_s:g} s")

    def _reason(self, board: Board) -> tuple[str, str]:
        ended = f"{len(board.done)} of {self.group.size} sessions of {board.lease.lease_id} were scored"
        if board.failures:
            first = next(iter(board.failures.values()))[-1]
            return first, f"{ended}; the first that was not ended as {first}"
        return "timeout", f"{ended} within {self.group.timeout_s:g} s"

    # -------------------------------------------------------------------------------------------------- sessions

    async def open(self, name: str | None, group: str | None, wait_s: float) -> Session:
        """A new session with a place, or 503 when none is free within `wait_s`."""
        if name is not None and (name in self.sessions or name in self.ended):
            raise ApiError(409, f"session {name!r} exists already; choose another name", "session_exists")
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while (place := self._free_place(group)) is None:
            if loop.time() >= until:
                raise ApiError(503, "no task is free; the run waits for open sessions or trains: ask again", "no_task")
            await self.changed.wait(until - loop.time())
        board, index = place
        board.group = group if board.began is None else board.group
        board.began = self.open_time() if board.began is None else board.began
        session = Session(
            name or secrets.token_hex(8), secrets.token_urlsafe(24), board, index, Dialogue(self.ends), loop.time()
        )
        board.open[index] = self.sessions[session.name] = self.keys[session.key] = session
        return session

    def _free_place(self, group: str | None) -> tuple[Board, int] | None:
        """Of the oldest lease: one of this group, else one that nobody has begun."""
        begun = [board for board in self.boards.values() if board.began is not None and board.group == group]
        for board in [*begun, *(board for board in self.boards.values() if board.began is None)]:
            for index in range(self.group.size):
                tried = len(board.failures.get(index, ())) > self.group.retries
                if index not in board.open and index not in board.done and not tried:
                    return board, index
        return None

    async def named(self, name: str, wait_s: float) -> Session:
        """The session of this name, opened by its first request."""
        if name in self.sessions or name in self.ended:
            return self.alive(self.sessions.get(name) or self.ended[name])
        return await self.open(name, None, wait_s)

    def by_key(self, key: str) -> Session | None:
        """Ended ones too: their client is told how they ended."""
        return self.keys.get(key)

    def alive(self, session: Session) -> Session:
        if session.ended:
            raise ApiError(410, f"session {session.name!r} has ended: {session.ended}", "session_ended")
        return session

    def give_up(self, session: Session) -> None:
        """The client's own wish: the place is free for another."""
        if not session.ended:
            self._fail(session, "given_up", "its client gave it up")

    async def close_session(self, session: Session, posted: PostScore) -> Score:
        """The first score counts. The same once more gets the same answer, another one is refused."""
        if session.posted is not None:
            if session.posted == posted and session.score is not None:
                return session.score
            raise ApiError(409, f"session {session.name!r} is closed already", "session_closed")
        self.alive(session)
        if session.requests:
            raise ApiError(409, f"session {session.name!r} still has a request under way", "session_busy")
        if not session.dialogue.turns:
            raise ApiError(400, f"session {session.name!r} has no answer of the model to score", "empty_session")
        session.posted = posted
        board, index = session.board, session.index
        episode_id = f"{board.lease.lease_id}/{index}"
        episode = Episode(episode_id=episode_id, samples=session.dialogue.samples(episode_id))
        session.score = await self.held(session, self._score_of(episode, board.lease, posted))
        self.alive(session)
        board.done[index] = MemberProgress(episode=episode, score=session.score)
        self._end(session, "it was scored")
        return session.score

    async def _score_of(self, episode: Episode, lease: Lease, posted: PostScore) -> Score:
        if posted.reward is not None or self.rewarder is None or self.rewarder.unit == "group":
            return Score(reward=posted.reward, parts=dict(posted.parts))
        return (await self._score([self._request(lease, episode, self.environment())]))[0]

    def _request(self, lease: Lease, episode: Episode, environment: Any) -> RewardRequest:
        """A client's prompt is not in the task: it is what stands before the last answer."""
        sample = episode.samples[-1]
        sampled = sample.loss_mask.astype(bool)
        first = len(sampled) - int((~sampled[::-1]).argmax()) if not sampled.all() else 0
        answer = sample.token_ids[first:]
        return RewardRequest(
            task=lease.task,
            prompt=environment.decode(sample.token_ids[:first]),
            completion=environment.decode(answer),
            token_ids=tuple(answer.tolist()),
            finish_reason=sample.finish_reason,
        )

    async def held(self, session: Session | None, work: Coroutine[Any, Any, T]) -> T:
        """Work for a session, which is not idle meanwhile; it is cancelled when the session ends."""
        task = asyncio.create_task(work)
        if session is not None:
            session.requests.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled() and session is not None:
                self.alive(session)
            return task.result()
        finally:
            task.cancel()
            if session is not None:
                session.requests.discard(task)
                session.heard_at = asyncio.get_running_loop().time()
                self.changed.fire()

    def _fail(self, session: Session, reason: str, words: str) -> None:
        session.board.failures.setdefault(session.index, []).append(reason)
        self._end(session, words)

    def _end(self, session: Session, words: str) -> None:
        session.ended = words
        session.board.open.pop(session.index, None)
        self.sessions.pop(session.name, None)
        self.ended[session.name] = session
        for request in list(session.requests):
            request.cancel()
        # What is remembered of it is how it ended, not what was said.
        session.dialogue, session.board = Dialogue(self.ends), Board(session.board.lease)
        if len(self.ended) > REMEMBERED:
            _, oldest = self.ended.popitem(last=False)
            self.keys.pop(oldest.key, None)
        self.changed.fire()

    # ------------------------------------------------------------------------------------------------ generation

    async def answer(
        self,
        session: Session | None,
        prompt: list[int],
        sampling: SamplingParams,
        report: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """One generation, through failures and interruptions; without a session it belongs to no lease."""
        if session is None:
            self.plain_requests += 1
            task = Task(task_id="", source="serve", payload={})
            lease, index, turn = Lease(lease_id=f"serve-{self.plain_requests}", index=-1, task=task), 0, 0
            seed = self.plain_requests if sampling.seed is None else sampling.seed
        else:
            lease, index = session.board.lease, session.index
            turn = session.board.turns[index] = session.board.turns.get(index, -1) + 1
            # Siblings with one seed would all say the same, whatever their client asks for.
            seed = member_seed(self.seed if sampling.seed is None else sampling.seed, lease.index, index, turn)
        ask = _Streamed(self.engine, report) if report is not None else None
        ids = np.array(prompt, np.int64)
        work = self._turn(lease, index, turn, ids, None, 0, sampling=sampling, seed=seed, ask=ask)
        try:
            return await self.held(session, work)
        except RolloutDropped as error:
            status = 400 if error.reason == "refused" else 503
            raise ApiError(status, error.detail.partition("\n")[0], error.reason) from None


class _Streamed:
    """Asks the engine for pieces. What was reported is never taken back: a further try goes on after it."""

    def __init__(self, engine: Any, report: Callable[[Generation], None]) -> None:
        self.engine, self.report = engine, report
        self.pieces: list[Generation] = []

    async def __call__(self, request: GenerateRequest) -> Generation:
        prefix = join_generations(self.pieces) if self.pieces else None
        return await self.engine.generate(replace(request, prefix=prefix), report=self._note)

    def _note(self, piece: Generation) -> None:
        self.pieces.append(piece)
        self.report(piece)
