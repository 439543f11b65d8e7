"""Requests into made-up generations that only cost time: the engine of the flow's tests and of the simulator.

Lengths and token ids follow from the request's seed alone, so a run repeats. A token takes `token_s`, a prompt
`prefill_s`; every token is stamped with the version that the engine runs when the token is due.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import RequestRefused, StaleTicket
from headrace.protocols import PauseMode, RunningPolicy, WorkerContext
from headrace.types import (
    NO_VERSION,
    EngineStats,
    Event,
    FinishReason,
    GenerateRequest,
    Generation,
    WeightTicket,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCosts:
    """Seconds, and the spread of lengths: log-normal with median `length`, cut at max_tokens."""

    token_s: float = 0.02
    prefill_s: float = 0.05
    prepare_s: float = 0.1
    commit_s: float = 0.001
    length: float = 16.0
    length_sigma: float = 0.6
    context_length: int = 1_000_000


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerateRequest
    length: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    aborted: bool = False
    wake: asyncio.Future[None] | None = field(default=None)

    def result(self, finish_reason: FinishReason) -> Generation:
        return Generation(
            token_ids=np.array(self.token_ids, np.int64),
            logprobs=np.array(self.logprobs, np.float32),
            policy_versions=np.array(self.versions, np.int64),
            finish_reason=finish_reason,
            sampling=self.request.sampling,
        )


class ScriptedEngine:
    """A `TextEngine` on the clock of its event loop."""

    def __init__(self, context: WorkerContext, costs: ScriptedCosts) -> None:
        self.context, self.costs = context, costs
        self.version = NO_VERSION
        self._staged: WeightTicket | None = None
        self._requests: dict[str, _Running] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._generated = 0
        self._prompt_tokens = 0
        self._swaps = 0

    # ------------------------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> Generation:
        if len(request.prompt_ids) >= self.costs.context_length:
            raise RequestRefused(
                f"prompt of {len(request.prompt_ids)} tokens, context of {self.costs.context_length}: shorten the prompt"
            )
        running = self._start(request)
        self._idle.clear()
        try:
            await self._sleep(running, self.costs.prefill_s)
            while len(running.token_ids) < running.length and not running.aborted:
                await self._sleep(running, self.costs.token_s)
                if running.aborted:
                    break
                if not self._open.is_set():
                    await self._held(running)
                    continue
                self._sample(running)
        finally:
            del self._requests[request.request_id]
            if not self._requests:
                self._idle.set()
        if running.aborted:
            return running.result("abort")
        return running.result("length" if running.length == request.sampling.max_tokens else "stop")

    def _start(self, request: GenerateRequest) -> _Running:
        rng = random.Random(request.sampling.seed or 0)
        drawn = round(self.costs.length * rng.lognormvariate(0.0, self.costs.length_sigma))
        prefix = request.prefix
        running = _Running(
            request=request,
            length=max(1, min(drawn, request.sampling.max_tokens)),
            token_ids=prefix.token_ids.tolist() if prefix else [],
            logprobs=prefix.logprobs.tolist() if prefix else [],
            versions=prefix.policy_versions.tolist() if prefix else [],
        )
        self._requests[request.request_id] = running
        self._prompt_tokens += len(request.prompt_ids)
        return running

    def _sample(self, running: _Running) -> None:
        position = len(running.token_ids)
        rng = random.Random(f"{running.request.sampling.seed}:{position}")
        running.token_ids.append(rng.randrange(1, 100))
        running.logprobs.append(-rng.random() - 0.01)
        running.versions.append(self.version)
        self._generated += 1

    async def _sleep(self, running: _Running, seconds: float) -> None:
        """Sleep that an abort ends at once."""
        loop = asyncio.get_running_loop()
        running.wake = loop.create_future()
        timer = loop.call_later(seconds, _set, running.wake)
        try:
            await running.wake
        finally:
            timer.cancel()
            running.wake = None

    async def _held(self, running: _Running) -> None:
        while not self._open.is_set() and not running.aborted:
            running.wake = asyncio.get_running_loop().create_future()
            await running.wake

    def _wake_all(self) -> None:
        for running in list(self._requests.values()):
            if running.wake is not None and not running.wake.done():
                running.wake.set_result(None)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        yield await self.generate(request)

    async def abort(self, request_id: str, keep_kv: bool = False) -> Generation | None:
        running = self._requests.get(request_id)
        if running is None:
            return None
        self._abort(running)
        return running.result("abort")

    def _abort(self, running: _Running) -> None:
        running.aborted = True
        if running.wake is not None and not running.wake.done():
            running.wake.set_result(None)

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
        self._staged = None
        self.version = ticket.version
        self._swaps += 1
        now = time_ns()
        self.context.record(Event(now, self.context.name, "swap", version=self.version))
        if running == "abort":
            for request in list(self._requests.values()):
                self._abort(request)

    async def pause(self, mode: PauseMode) -> None:
        if mode == "wait":
            await self._idle.wait()
        self._open.clear()
        if mode == "abort":
            for request in list(self._requests.values()):
                self._abort(request)

    async def resume(self) -> None:
        self._open.set()
        self._wake_all()

    async def sleep(self, level: int) -> None:
        await self.pause("abort")

    async def wake(self) -> None:
        await self.resume()

    async def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            staged_version=self._staged.version if self._staged else NO_VERSION,
            running=len(self._requests),
            paused=not self._open.is_set(),
            progress={request_id: len(running.token_ids) for request_id, running in self._requests.items()},
            generated_tokens=self._generated,
            prompt_tokens=self._prompt_tokens,
            swaps=self._swaps,
        )

    async def close(self) -> None:
        await self.pause("abort")


def time_ns() -> int:
    """Now, in nanoseconds of the running loop's clock."""
    return int(asyncio.get_running_loop().time() * 1e9)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def build_scripted(context: WorkerContext, costs: ScriptedCosts | None = None) -> ScriptedEngine:
    """The factory that a runtime spawns."""
    return ScriptedEngine(context, costs or ScriptedCosts())
