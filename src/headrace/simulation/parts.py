"""Tasks, environment, scorer, trainer and observer that only cost time and keep what they were given."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.observability.metrics import DropTally, unit_lengths
from headrace.orchestrator.controller import Controller
from headrace.orchestrator.flow import StepReport
from headrace.protocols import Lease, RewardRequest, Turn, WorkerContext
from headrace.rollout.engines.scripted import ScriptedCosts, ScriptedEngine, uniform
from headrace.rollout.sources.length_buckets import prompt_key
from headrace.training.batching import filter_zero_variance
from headrace.types import Event, Generation, Metrics, Score, Task, Unit, WeightTicket


class NumberedTasks:
    """An endless source, or `count` tasks; remembers what came back. distinct: so many tasks come again and again."""

    def __init__(self, count: int | None = None, distinct: int = 0) -> None:
        self.count, self.distinct, self.given = count, distinct, 0
        self.returned: Counter[str] = Counter()

    def next(self) -> Task | None:
        if self.count is not None and self.given >= self.count:
            return None
        self.given += 1
        epoch, number = divmod(self.given, self.distinct) if self.distinct else (0, self.given)
        return Task(task_id=f"t{number}#{epoch}" if epoch else f"t{number}", source="numbers", payload={"prompt": "x"})

    def give_back(self, task: Task, reason: str) -> None:
        self.returned[reason] += 1

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def restore(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class OneTurn:
    """One prompt, one answer. What a prompt costs is the engine's matter, so it is a token long: the task's own."""

    async def reset(self, task: Task) -> Turn:
        return Turn(prompt_ids=[zlib.crc32(prompt_key(task).encode())])

    async def step(self, generation: Generation) -> Turn:
        return Turn(done=True)

    async def close(self) -> None: ...

    def prompt_text(self, task: Task) -> str:
        return "x"

    def decode(self, token_ids: Any) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCosts:
    """Seconds of one score and their spread; `fails`: share that comes back empty; hard, easy: tasks that none, or all
    members solve. Whether a member solves a task follows from the two alone."""

    score_s: float = 0.0
    sigma: float = 0.0
    fails: float = 0.0
    hard: float = 0.0
    easy: float = 0.0


class TimedScorer:
    """A `Rewarder` for any number of samples at a time."""

    unit = "sample"

    def __init__(self, costs: ScoreCosts, seed: int) -> None:
        self.costs, self.seed, self.rng = costs, seed, random.Random(f"scores {seed}")

    async def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        costs = self.costs
        if costs.score_s:
            await asyncio.sleep(costs.score_s * self.rng.lognormvariate(0.0, costs.sigma))
        if costs.fails and self.rng.random() < costs.fails:
            return [Score(reward=None, error="scorer failed") for _ in requests]
        return [Score(reward=self._reward(request)) for request in requests]

    def _reward(self, request: RewardRequest) -> float:
        kind = uniform(zlib.crc32(request.task.task_id.encode()) + self.seed)
        if kind < self.costs.hard:
            return 0.0
        return 1.0 if kind >= 1 - self.costs.easy else float(sum(request.token_ids) % 2)

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCosts:
    """tokens_per_s: of prompts and completions, 0: they cost nothing; grain: real tokens behind one simulated one."""

    tokens_per_s: float = 0.0
    step_s: float = 0.0
    prompt_tokens: int = 0
    grain: int = 1
    publish_s: float = 0.0
    offload_s: float = 0.0

    def tokens(self, units: Sequence[Any]) -> int:
        return sum(self.prompt_tokens + self.grain * sum(unit_lengths(unit)) for unit in units)


class TimedLearner:
    """A `Learner`, and the backend that takes turns under colocated. `drops(units)`: which of them are not wanted."""

    updates_weights = True
    done = False
    name, pid = "trainer", None

    def __init__(self, costs: LearnerCosts, drops: Callable[[Sequence[Any]], list[bool]]) -> None:
        self.costs, self.unwanted = costs, drops
        self.resident = True
        """Whether it is its turn on devices that it shares."""
        self.streams = False
        self.busy_s = 0.0
        self.begun: list[str] = []
        self.published: list[int] = []

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.busy_s += seconds

    def _seconds(self, units: Sequence[Any]) -> float:
        return self.costs.tokens(units) / self.costs.tokens_per_s if self.costs.tokens_per_s else 0.0

    async def begin(self, units: Sequence[Any]) -> None:
        await self._work(self._seconds(units))
        self.begun.extend(unit.unit_id for unit in units)

    async def train(self, units: Sequence[Any]) -> Metrics:
        assert self.resident, "trains while the engines have the devices"
        if self.begun:
            assert sorted(self.begun) == sorted(unit.unit_id for unit in units), "each unit's gradient once"
            self.begun.clear()
            await self._work(self.costs.step_s)
        else:
            await self._work(self._seconds(units) + self.costs.step_s)
        return {}

    async def publish(self, version: int) -> WeightTicket:
        await self._work(self.costs.publish_s)
        self.published.append(version)
        return WeightTicket(policy="main", version=version, scope="full", locator="", checksum="")

    async def onload(self) -> None:
        await asyncio.sleep(self.costs.offload_s)
        self.resident = True

    async def offload(self) -> None:
        await asyncio.sleep(self.costs.offload_s)
        self.resident = False

    async def save(self, folder: Path) -> None: ...


def drops_zero_variance(units: Sequence[Any]) -> list[bool]:
    """Groups whose scores are all equal."""
    kept = {group.group_id for group in filter_zero_variance(units)[0]}
    return [group.group_id not in kept for group in units]


class FlakyEngine(ScriptedEngine):
    """Loses replies (the share `lose`), and may stop answering altogether (`hung`)."""

    def __init__(self, context: WorkerContext, costs: ScriptedCosts, lose: float, rng: random.Random) -> None:
        super().__init__(context, costs)
        self.lose, self.rng, self.hung = lose, rng, False

    async def _run(self, one: Any) -> Generation:
        lost = self.rng.random() < self.lose
        result = await super()._run(one)
        if lost or self.hung:
            await asyncio.Event().wait()
        return result

    async def _answer(self) -> None:
        if self.hung:
            await asyncio.Event().wait()

    async def stats(self) -> Any:
        await self._answer()
        return await super().stats()

    async def prepare(self, ticket: WeightTicket) -> None:
        await self._answer()
        await super().prepare(ticket)

    async def commit(self, ticket: WeightTicket, running: Any = "go_on") -> None:
        await self._answer()
        await super().commit(ticket, running)


def build_flaky(
    context: WorkerContext, costs: ScriptedCosts, lose: float, rng: random.Random, register: list[Any]
) -> FlakyEngine:
    engine = FlakyEngine(context, costs, lose, rng)
    register.append(engine)
    return engine


@dataclass
class Watcher:
    """A `FlowObserver` that keeps what happened; with `keep` off, only what does not grow with the run's events."""

    keep: bool = True
    grain: int = 1
    events: list[Event] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    written: list[int] = field(default_factory=list)
    checkpoints: int = 0
    on_checkpoint: Callable[[Controller], Awaitable[None]] | None = None
    on_step: Callable[[StepReport], None] = lambda report: None
    tally: DropTally = field(default_factory=DropTally)

    def event(self, event: Event) -> None:
        if self.keep:
            self.events.append(event)

    def step(self, report: StepReport) -> None:
        for unit in report.units:
            self.tally.trained([length * self.grain for length in unit_lengths(unit)])
        self.on_step(report)
        if self.keep:
            self.reports.append(report)

    def message(self, text: str) -> None:
        if self.keep or len(self.messages) < 1000:
            self.messages.append(text)

    def dropped(self, lease: Lease, reason: str, unit: Unit | None) -> None:
        self.drops[reason] += 1
        self.tally.dropped(reason, [length * self.grain for length in unit_lengths(unit)] if unit is not None else ())

    def version_written(self, version: int) -> None:
        self.written.append(version)

    async def checkpoint(self, controller: Controller) -> None:
        self.checkpoints += 1
        if self.on_checkpoint is not None:
            await self.on_checkpoint(controller)

    async def evaluate(self, step: int) -> None: ...
