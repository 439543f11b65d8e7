"""Requests into made-up generations that only cost time: the engine of the flow's tests and of the simulator.

The cost is processor sharing: all running requests advance together, at a pace that follows from how many they are. One
timer stands for the next request to end; it is set anew when one is admitted, ends or is cut off, never token by token.
`progress` counts the tokens that a request which had run from the start would have by now; a request that began at b has
``floor(progress - b)`` of them, and versions are kept as runs: where `progress` stood at each swap.

Lengths and token ids follow from the request's seed alone, so a run repeats.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, RequestRefused, StaleTicket
from headrace.protocols import PauseMode, RunningPolicy, WorkerContext
from headrace.signals import Signal
from headrace.types import (
    NO_VERSION,
    EngineStats,
    Event,
    FinishReason,
    GenerateRequest,
    Generation,
    WeightTicket,
)

ROUNDING = 1e-6
"""Tokens: what sums of floating-point progress may be off by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCosts:
    """Seconds, and the spread of lengths.

    token_s: one decoding step when nothing else runs; token_s_each: what every further running request adds to it
    rates: (running requests, tokens a second of the engine), ascending, in place of both: a step's seconds are drawn
        straight between them, and on with the last slope
    prefill_s: one prompt, during which nothing is decoded; a prompt that siblings share is computed once
    max_running: requests decoded side by side, the others wait; 0 sets no bound
    length, length_sigma: log-normal with that median, cut at max_tokens; task_sigma: spread of the median over prompts, by
        their first token; runaway: share that goes on to max_tokens
    """

    token_s: float = 0.02
    token_s_each: float = 0.0
    rates: tuple[tuple[int, float], ...] = ()
    prefill_s: float = 0.05
    prepare_s: float = 0.1
    commit_s: float = 0.001
    wake_s: float = 0.0
    max_running: int = 0
    length: float = 16.0
    length_sigma: float = 0.6
    task_sigma: float = 0.0
    runaway: float = 0.0
    context_length: int = 1_000_000

    def step_s(self, running: int) -> float:
        """Seconds in which each of so many requests gets one token."""
        if not self.rates:
            return self.token_s + self.token_s_each * (running - 1)
        points = [(count, count / rate) for count, rate in self.rates]
        if running <= points[0][0] or len(points) == 1:
            return points[0][1] * (1.0 if running <= points[0][0] else running / points[0][0])
        pairs = list(itertools.pairwise(points))
        (low, low_s), (high, high_s) = next((pair for pair in pairs if running <= pair[1][0]), pairs[-1])
        return low_s + (high_s - low_s) * (running - low) / (high - low)


@dataclass(slots=True, eq=False)
class _Running:
    """request_id: of `request`, put together once
    begin: the engine's progress when its first own token's turn began; first_run: index of the version live then."""

    request: GenerateRequest
    request_id: str
    length: int
    kept: int
    done: asyncio.Future[None]
    begin: float = -1.0
    first_run: int = 0
    cut: int | None = None

    @property
    def end(self) -> float:
        return self.begin + self.length - self.kept


class ScriptedEngine:
    """A `TextEngine` on the clock of its event loop."""

    def __init__(self, context: WorkerContext, costs: ScriptedCosts) -> None:
        self.context, self.costs = context, costs
        self.version = NO_VERSION
        self.progress = 0.0
        self._step_s: dict[int, float] = {}
        self.busy_s = 0.0
        self.drawn = self.drawn_tokens = 0
        """Answers that were begun, and the tokens that they would have if nobody cut them."""
        self._settled_at = self._stalled_until = 0.0
        self._runs: deque[tuple[float, int]] = deque()
        """(progress at the swap, version), oldest first; those that no running request needs are forgotten."""
        self._forgotten_runs = 0
        self._staged: WeightTicket | None = None
        self._requests: dict[str, _Running] = {}
        self._ended: list[tuple[str, Generation | HeadraceError]] = []
        self._has_ended = Signal()
        self._waiting: deque[_Running] = deque()
        self._decoding: dict[_Running, None] = {}
        self._ends: list[tuple[float, int, _Running]] = []
        self._admitted = 0
        self._siblings: dict[str, int] = {}
        """Group id -> its requests here."""
        self._computed: dict[str, None] = {}
        """Groups whose prompt was computed, while they have requests here."""
        self._timer: asyncio.TimerHandle | None = None
        self._looks_again = False
        self._open = True
        self._idle = asyncio.Event()
        self._idle.set()
        self._finished_tokens = self._prompt_tokens = self._swaps = 0
        self._busy_since: float | None = None

    # ------------------------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._run(self._start(request))

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            try:
                task = asyncio.ensure_future(self._run(self._start(request)))
            except RequestRefused as refused:
                self._note_end(request.request_id, refused)
            else:
                task.add_done_callback(partial(self._note_task, request.request_id))

    async def ended(self) -> list[tuple[str, Generation | HeadraceError]]:
        while not self._ended:
            await self._has_ended.wait()
        ends, self._ended = self._ended, []
        return ends

    def _note_task(self, request_id: str, task: asyncio.Task[Generation]) -> None:
        if not task.cancelled():
            self._note_end(request_id, task.exception() or task.result())

    def _note_end(self, request_id: str, result: Any) -> None:
        self._ended.append((request_id, result))
        self._has_ended.fire()

    async def _run(self, one: _Running) -> Generation:
        try:
            await one.done
            reason: FinishReason = "length" if one.length == one.request.sampling.max_tokens else "stop"
            return self._result(one, "abort" if one.cut is not None else reason)
        finally:
            self._leave(one)

    def _start(self, request: GenerateRequest) -> _Running:
        if len(request.prompt_ids) >= self.costs.context_length:
            raise RequestRefused(
                f"prompt of {len(request.prompt_ids)} tokens, context of {self.costs.context_length}: shorten the prompt"
            )
        kept = len(request.prefix.token_ids) if request.prefix is not None else 0
        one = _Running(
            request, request.request_id, self._length(request), kept, asyncio.get_running_loop().create_future()
        )
        self._requests[one.request_id] = one
        self._idle.clear()
        if request.prefix is None:
            self.drawn += 1
            self.drawn_tokens += one.length
        self._siblings[request.group_id] = self._siblings.get(request.group_id, 0) + 1
        self._waiting.append(one)
        self._look_again()
        return one

    def _look_again(self) -> None:
        """`_reschedule` at this moment, once for all that come or go in it: siblings do so together."""
        if not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looks_again = False
        self._settle()
        self._reschedule()

    def _length(self, request: GenerateRequest) -> int:
        costs, most = self.costs, request.sampling.max_tokens
        seed = _seed_of(request)
        if costs.runaway and uniform(seed + 1) < costs.runaway:
            return most
        spread = costs.length_sigma * NORMAL.inv_cdf(uniform(seed))
        if costs.task_sigma:
            spread += costs.task_sigma * NORMAL.inv_cdf(uniform(int(request.prompt_ids[0])))
        return max(1, round(min(costs.length * math.exp(spread), most)))

    def _settle(self) -> None:
        """Bring `progress` up to now."""
        now = asyncio.get_running_loop().time()
        if self._decoding and self._open:
            decoding_s = now - max(self._settled_at, min(self._stalled_until, now))
            self.progress += decoding_s / self._pace()
        self._settled_at = now

    def _pace(self) -> float:
        """Seconds of a step with what runs now."""
        running = len(self._decoding)
        if running not in self._step_s:
            self._step_s[running] = self.costs.step_s(running)
        return self._step_s[running]

    def _reschedule(self) -> None:
        """Let in what there is room for, and set the timer to the next end. Called after `_settle`."""
        while self._open and self._waiting and not 0 < self.costs.max_running <= len(self._decoding):
            self._admit(self._waiting.popleft())
        now = self._settled_at
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2].done.done():
            heapq.heappop(self._ends)
        self._note_busy(bool(self._decoding) and self._open)
        if self._ends and self._open:
            tokens = max(0.0, self._ends[0][0] - self.progress)
            due = max(now, self._stalled_until) + tokens * self._pace()
            self._timer = asyncio.get_running_loop().call_at(due, self._due)

    def _admit(self, one: _Running) -> None:
        if one.request.group_id not in self._computed:
            self._computed[one.request.group_id] = None
            self._stalled_until = max(self._stalled_until, self._settled_at) + self.costs.prefill_s
            self._prompt_tokens += len(one.request.prompt_ids)
        one.begin, one.first_run = self.progress, self._forgotten_runs + max(0, len(self._runs) - 1)
        self._decoding[one] = None
        self._admitted += 1
        heapq.heappush(self._ends, (one.end, self._admitted, one))

    def _due(self) -> None:
        self._timer = None
        self._settle()
        while self._ends and (self._ends[0][2].done.done() or self._ends[0][0] <= self.progress + ROUNDING):
            _, _, one = heapq.heappop(self._ends)
            if not one.done.done():
                # The place is free at once, whenever the caller gets to run.
                self._decoding.pop(one, None)
                one.done.set_result(None)
        self._reschedule()

    def _sampled(self, one: _Running) -> int:
        """Tokens that a request has by now, its prefix included."""
        if one.cut is not None:
            return one.cut
        if one.begin < 0:
            return one.kept
        return min(one.length, one.kept + math.floor(self.progress - one.begin + ROUNDING))

    def _leave(self, one: _Running) -> None:
        self._settle()
        self._finished_tokens += self._sampled(one) - one.kept
        if one.cut is None and not (one.done.done() and not one.done.cancelled()):
            one.cut = self._sampled(one)  # the caller is gone
        one.done.cancel()
        self._decoding.pop(one, None)
        if one.begin < 0 and one in self._waiting:
            self._waiting.remove(one)
        del self._requests[one.request_id]
        group = one.request.group_id
        self._siblings[group] -= 1
        if not self._siblings[group]:
            del self._siblings[group]
            self._computed.pop(group, None)
        if not self._requests:
            self._idle.set()
        self._forget_runs()
        self._look_again()

    def _result(self, one: _Running, reason: FinishReason) -> Generation:
        prefix, total = one.request.prefix, self._sampled(one) if reason == "abort" else one.length
        own = total - one.kept
        start = _seed_of(one.request) % 1_000_003
        token_ids, versions = (np.arange(one.kept, total) + start) * 7919 % 99 + 1, self._versions(one, own)
        logprobs = np.full(own, -1.0, np.float32)
        if prefix is not None:
            token_ids = np.concatenate([prefix.token_ids, token_ids])
            logprobs = np.concatenate([prefix.logprobs, logprobs])
            versions = np.concatenate([prefix.policy_versions, versions])
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=versions,
            finish_reason=reason,
            sampling=replace(one.request.sampling, seed=_seed_of(one.request))
            if reason == "abort"
            else one.request.sampling,
        )

    def _versions(self, one: _Running, own: int) -> np.ndarray:
        """[own] the version that was live when each token was due."""
        if one.first_run - self._forgotten_runs >= len(self._runs) - 1:
            return np.full(own, self.version, np.int64)
        runs = list(self._runs)[one.first_run - self._forgotten_runs :]
        numbers = [version for _, version in runs] or [self.version]
        starts = [0, *(min(own, math.floor(at - one.begin + ROUNDING)) for at, _ in runs[1:]), own]
        return np.repeat(np.array(numbers, np.int64), np.diff(starts))

    def _forget_runs(self) -> None:
        if len(self._runs) < 64:
            return
        needed = min((one.first_run for one in self._decoding), default=self._forgotten_runs + len(self._runs) - 1)
        while len(self._runs) > 1 and self._forgotten_runs < needed and not self._ending():
            self._runs.popleft()
            self._forgotten_runs += 1

    def _ending(self) -> bool:
        """Some request is done and its caller has not run yet: it still reads the runs."""
        return len(self._decoding) + len(self._waiting) < len(self._requests)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        yield await self.generate(request)

    async def abort(self, request_id: str, keep_kv: bool = False) -> Generation | None:
        one = self._requests.get(request_id)
        if one is None or one.done.done():
            return None
        self._settle()
        self._cut(one)
        self._reschedule()
        return self._result(one, "abort")

    def _cut(self, one: _Running) -> None:
        if not one.done.done():
            one.cut = self._sampled(one)
            if one.begin < 0:
                self._waiting.remove(one)
            self._decoding.pop(one, None)
            one.done.set_result(None)

    def _cut_started(self) -> None:
        """What has begun; what still waits for a place has nothing to hand back and goes on waiting."""
        for one in list(self._decoding):
            self._cut(one)

    # --------------------------------------------------------------------------------------------------- weights

    async def prepare(self, ticket: WeightTicket) -> None:
        if ticket.version < self.version:
            raise StaleTicket(f"{self.context.name} runs version {self.version} and was sent {ticket.version}")
        await asyncio.sleep(self.costs.prepare_s)
        if self._staged is None or ticket.version >= self._staged.version:
            self._staged = ticket

    async def commit(self, ticket: WeightTicket, running: RunningPolicy = "go_on") -> None:
        if ticket.version < self.version:
            raise StaleTicket(f"{self.context.name} runs version {self.version} and was sent {ticket.version}")
        if ticket.version == self.version:
            return
        if self._staged is None or self._staged.version != ticket.version:
            await self.prepare(ticket)
        await asyncio.sleep(self.costs.commit_s)
        if ticket.version <= self.version:
            return
        self._settle()
        self._staged = None
        self.version = ticket.version
        self._runs.append((self.progress, self.version))
        self._swaps += 1
        self.context.record(Event(time_ns(), self.context.name, "swap", version=self.version))
        if running == "abort":
            self._cut_started()
        self._reschedule()

    async def pause(self, mode: PauseMode) -> None:
        if mode == "wait":
            await self._idle.wait()
        self._settle()
        self._open = False
        if mode == "abort":
            self._cut_started()
        self._reschedule()

    async def resume(self) -> None:
        self._settle()
        self._open = True
        self._reschedule()

    async def sleep(self, level: int) -> None:
        await self.pause("keep")

    async def wake(self) -> None:
        await asyncio.sleep(self.costs.wake_s)
        await self.resume()

    async def stats(self) -> EngineStats:
        self._settle()
        progress = {request_id: self._sampled(one) for request_id, one in self._requests.items()}
        running = sum(progress[request_id] - one.kept for request_id, one in self._requests.items())
        return EngineStats(
            version=self.version,
            staged_version=self._staged.version if self._staged else NO_VERSION,
            running=len(self._decoding),
            waiting=len(self._waiting),
            paused=not self._open,
            progress=progress,
            generated_tokens=self._finished_tokens + running,
            prompt_tokens=self._prompt_tokens,
            swaps=self._swaps,
        )

    async def close(self) -> None:
        await self.pause("abort")

    def _note_busy(self, busy: bool) -> None:
        """One "generate" event from the first request to the moment when nothing is decoded."""
        now = self._settled_at
        if busy and self._busy_since is None:
            self._busy_since = now
        elif not busy and self._busy_since is not None:
            began, self._busy_since = self._busy_since, None
            self.busy_s += now - began
            span = Event(int(began * 1e9), self.context.name, "generate", "", self.version, int((now - began) * 1e9))
            self.context.record(span)


def _seed_of(request: GenerateRequest) -> int:
    """That of the first try, so that an answer which was cut and sent back stays the same answer."""
    if request.prefix is not None and request.prefix.sampling.seed is not None:
        return request.prefix.sampling.seed
    return request.drawn_by or 0


NORMAL = NormalDist()


def uniform(seed: int) -> float:
    """A number between 0 and 1, both excluded, that follows from the seed alone (splitmix64: a generator object costs more
    than all else about a request)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 31)) + 0.5) / 2**64


def time_ns() -> int:
    """Now, in nanoseconds of the running loop's clock."""
    return int(asyncio.get_running_loop().time() * 1e9)


def build_scripted(context: WorkerContext, costs: ScriptedCosts | None = None) -> ScriptedEngine:
    """The factory that a runtime spawns."""
    return ScriptedEngine(context, costs or ScriptedCosts())
