"""Turns a batch of requests into scores inside a worker process, and records each call for the timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.protocols import RewardRequest, WorkerContext
from headrace.reward.combine import Combiner
from headrace.reward.config import RewardConfig
from headrace.reward.functions import load_functions
from headrace.types import Event, Score


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker found out by loading the functions."""

    names: tuple[str, ...]
    asynchronous: bool
    """Every function waits without blocking: many requests can wait side by side."""


@dataclass(frozen=True, slots=True)
class ScoredCall:
    """The answer to one call. `timeouts` counts parts that their own limit ended."""

    scores: list[Score]
    timeouts: int = 0


class RewardWorker:
    """Holds the loaded functions. A blocking function blocks this process; its parent ends it then."""

    def __init__(self, context: WorkerContext, config: RewardConfig, base_folder: Path) -> None:
        functions = load_functions(config, base_folder)
        self._context = context
        self._combiner = Combiner(functions, config.on_error, config.timeout_s)
        self._names = tuple(function.name for function in functions)

    @property
    def waits(self) -> bool:
        """Whether a call may give way to others while it is not done, as far as is known."""
        return bool(self._combiner.waiting)

    async def facts(self) -> WorkerFacts:
        return WorkerFacts(self._names, self._combiner.asynchronous)

    async def score(self, requests: Sequence[RewardRequest]) -> ScoredCall:
        """One score for each request, in order. Never raises for what a function does."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        scores, timeouts = await self._combiner.score(requests)
        self._context.record(score_event(self._context.name, requests, started_s, loop.time()))
        return ScoredCall(scores, timeouts)

    async def close(self) -> None:
        """Nothing is held that outlives the process."""


def build_worker(context: WorkerContext, config: RewardConfig, base_folder: str) -> RewardWorker:
    """The factory that a runtime calls in the worker's process."""
    return RewardWorker(context, config, Path(base_folder))


def score_event(source: str, requests: Sequence[RewardRequest], started_s: float, ended_s: float) -> Event:
    """The timeline's "score": the first request's task, and how many more were in the same call."""
    more = f" +{len(requests) - 1}" if len(requests) > 1 else ""
    subject = f"{requests[0].task.task_id}{more}" if requests else ""
    started_ns, ended_ns = round(started_s * 1e9), round(ended_s * 1e9)
    return Event(started_ns, source, "score", subject, duration_ns=max(0, ended_ns - started_ns))
