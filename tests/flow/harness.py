"""A whole run of the real orchestrator on a virtual clock: scripted engines, scorer and trainer, with faults on demand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.interruption import INTERRUPTIONS
from headrace.exchange.ledger import Ledger
from headrace.exchange.staleness import Capacity, VersionLine
from headrace.exchange.stores.memory import MemoryStore
from headrace.orchestrator.controller import Controller, FlowSettings, StepReport
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.orchestrator.turns import Turns
from headrace.orchestrator.weight_sync import WeightSync
from headrace.protocols import Lease, RewardRequest, Turn
from headrace.rollout.config import GroupConfig
from headrace.rollout.engines.scripted import ScriptedCosts, ScriptedEngine
from headrace.rollout.partial import PARTIAL_POLICIES
from headrace.rollout.token_rollout import TokenRollout
from headrace.types import Event, Generation, Group, Metrics, SamplingParams, Score, Task, WeightTicket


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One schedule: sizes, policies, costs and faults. Everything random follows from `seed`."""

    seed: int = 0
    batch: int = 4
    steps: int = 6
    ahead: int | None = 1
    oversample: int = 0
    max_in_flight: int = 0
    engines: int = 2
    group_size: int = 3
    min_complete: int = 0
    group_timeout_s: float = 200.0
    retries: int = 2
    interruption: str = "never"
    partial: str = "continue"
    every_steps: int = 1
    max_version_lag: int | None = None
    on_stale: str = "drop"
    cancel_group: bool = False
    stream_groups: int = 0
    colocated: bool = False
    refill_limit: int = 4
    tasks: int | None = None
    train_s: float = 1.0
    score_s: float = 0.1
    costs: ScriptedCosts = field(default_factory=ScriptedCosts)
    drop_share: float = 0.0
    """Share of groups that the trainer's filter drops."""
    score_fails: float = 0.0
    lose_replies: float = 0.0
    kills_s: tuple[float, ...] = ()
    """Moments at which an engine dies."""
    hang_s: tuple[float, ...] = ()
    """Moments at which an engine stops answering anything."""
    stop_at_s: float | None = None
    max_dropped: int = 10_000
    restarts: int = 20
    rejoin_timeout_s: float = 60.0
    drain_timeout_s: float = 60.0
    stall_stop_s: float = 2000.0


class ListSource:
    """Numbered tasks, and a memory of what came back."""

    def __init__(self, count: int | None) -> None:
        self.count, self.given = count, 0
        self.returned: Counter[str] = Counter()

    def next(self) -> Task | None:
        if self.count is not None and self.given >= self.count:
            return None
        self.given += 1
        return Task(task_id=f"t{self.given}", source="list", payload={"prompt": "x"})

    def give_back(self, task: Task, reason: str) -> None:
        self.returned[reason] += 1

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def restore(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class OneTurn:
    async def reset(self, task: Task) -> Turn:
        return Turn(prompt_ids=[1, 2, 3])

    async def step(self, generation: Generation) -> Turn:
        return Turn(done=True)

    async def close(self) -> None: ...

    def prompt_text(self, task: Task) -> str:
        return "x"

    def decode(self, token_ids: Any) -> str:
        return " ".join(map(str, token_ids))


class SlowScorer:
    unit = "sample"

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed + 1)

    async def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        await asyncio.sleep(self.plan.score_s)
        if self.rng.random() < self.plan.score_fails:
            return [Score(reward=None, error="scorer failed") for _ in requests]
        return [Score(reward=float(len(request.token_ids) % 2)) for request in requests]

    async def close(self) -> None: ...


class TimedLearner:
    """Counts what it is given; its time is virtual."""

    updates_weights, done = True, False

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed + 2)
        self.batches: list[list[Group]] = []
        self.begun: list[str] = []
        self.published: list[int] = []
        self.resident = True
        """Whether it is its turn on devices that it shares."""

    def unwanted(self, units: Sequence[Any]) -> list[bool]:
        return [self.rng.random() < self.plan.drop_share for _ in units]

    name, pid = "trainer", None

    async def onload(self) -> None:
        await asyncio.sleep(0.2)
        self.resident = True

    async def offload(self) -> None:
        await asyncio.sleep(0.2)
        self.resident = False

    async def begin(self, units: Sequence[Any]) -> None:
        await asyncio.sleep(self.plan.train_s * len(units) / self.plan.batch)
        self.begun.extend(unit.unit_id for unit in units)

    async def train(self, units: Sequence[Any]) -> Metrics:
        if self.plan.stream_groups:
            assert sorted(self.begun) == sorted(unit.unit_id for unit in units), "each unit's gradient once"
            self.begun.clear()
        else:
            assert self.resident, "trains while the engines have the devices"
            await asyncio.sleep(self.plan.train_s)
        self.batches.append(list(units))
        return {}

    async def publish(self, version: int) -> WeightTicket:
        await asyncio.sleep(0.05)
        self.published.append(version)
        return WeightTicket(policy="main", version=version, scope="full", locator="", checksum="")

    async def save(self, folder: Path) -> None: ...


@dataclass
class Watcher:
    """Records everything; the event log is the run's fingerprint."""

    events: list[Event] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    written: list[int] = field(default_factory=list)
    checkpoints: int = 0

    def event(self, event: Event) -> None:
        self.events.append(event)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def dropped(self, lease: Lease, reason: str, unit: Any) -> None:
        self.drops[reason] += 1

    def version_written(self, version: int) -> None:
        self.written.append(version)

    async def checkpoint(self, controller: Controller) -> None:
        self.checkpoints += 1

    async def evaluate(self, step: int) -> None: ...


class FlakyEngine(ScriptedEngine):
    """Loses replies, and may stop answering altogether."""

    def __init__(self, context: Any, costs: ScriptedCosts, lose: float, rng: random.Random) -> None:
        super().__init__(context, costs)
        self.lose, self.rng, self.hung = lose, rng, False

    async def generate(self, request: Any) -> Generation:
        lost = self.rng.random() < self.lose
        result = await super().generate(request)
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
    context: Any, costs: ScriptedCosts, lose: float, rng: random.Random, register: list[Any]
) -> FlakyEngine:
    engine = FlakyEngine(context, costs, lose, rng)
    register.append(engine)
    return engine


@dataclass
class Outcome:
    controller: Controller
    watcher: Watcher
    learner: TimedLearner
    source: ListSource
    state: str
    error: BaseException | None
    seconds: float

    @property
    def log(self) -> list[Event]:
        return self.watcher.events


def simulate(plan: Plan) -> Outcome:
    """Run the plan on a virtual clock; an error of the run is in the outcome, a broken law is raised."""
    return run_simulated(_simulate(plan))


async def _simulate(plan: Plan) -> Outcome:
    loop = asyncio.get_running_loop()
    watcher, source, learner = Watcher(), ListSource(plan.tasks), TimedLearner(plan)
    runtime = LocalRuntime(watcher.event)
    versions = VersionLine()
    buffer = LeaseBuffer(
        source,
        MemoryStore(),
        Ledger(),
        versions,
        Capacity(batch=plan.batch, ahead=plan.ahead, oversample=plan.oversample, max_in_flight=plan.max_in_flight),
        max_version_lag=plan.max_version_lag,
        on_stale=plan.on_stale,
    )
    dispatcher = Dispatcher(generate_timeout_s=10.0, rejoin_timeout_s=plan.rejoin_timeout_s)
    dispatcher.oldest = {} if plan.cancel_group else None
    rollout = TokenRollout(
        dispatcher,
        OneTurn,
        SlowScorer(plan),
        sampling=SamplingParams(max_tokens=64),
        group=GroupConfig(
            size=plan.group_size, min_complete=plan.min_complete, timeout_s=plan.group_timeout_s, retries=plan.retries
        ),
        partial=PARTIAL_POLICIES[plan.partial],
        open_time=dispatcher.open_time,
        seed=plan.seed,
    )

    async def scored() -> None:
        while rollout.scoring:
            await asyncio.sleep(0.01)

    sync = WeightSync(
        dispatcher,
        INTERRUPTIONS[plan.interruption],
        prepare_timeout_s=5.0,
        commit_timeout_s=5.0,
        drain_timeout_s=plan.drain_timeout_s,
        scoring=scored,
    )
    engines: list[FlakyEngine] = []
    faults = random.Random(plan.seed + 3)

    async def spawn(name: str) -> EngineSlot:
        await asyncio.sleep(2.0)
        proxy = await runtime.spawn(
            name, build_flaky, plan.costs, plan.lose_replies, random.Random(faults.random()), engines
        )
        return EngineSlot(name, proxy)

    for number in range(plan.engines):
        dispatcher.join(await spawn(f"engine-{number}"))
    controller = Controller(
        FlowSettings(
            batch=plan.batch,
            steps=plan.steps,
            every_steps=plan.every_steps,
            refill_limit=plan.refill_limit,
            stream_groups=plan.stream_groups,
            stall_stop_s=plan.stall_stop_s,
            max_dropped=plan.max_dropped,
            restarts=plan.restarts,
        ),
        buffer,
        dispatcher,
        sync,
        rollout,
        learner,
        watcher,
        spawn_engine=spawn,
        turns=Turns(sync, learner) if plan.colocated else None,
    )

    def kill_one() -> None:
        live = dispatcher.live()
        if live:
            killing.append(asyncio.ensure_future(faults.choice(live).proxy.kill()))

    def hang_one() -> None:
        if engines:
            faults.choice(engines).hung = True

    killing: list[Any] = []
    for moment in plan.kills_s:
        loop.call_at(moment, kill_one)
    for moment in plan.hang_s:
        loop.call_at(moment, hang_one)
    if plan.stop_at_s is not None:
        loop.call_at(plan.stop_at_s, controller.request_stop)
    error: BaseException | None = None
    try:
        await controller.run()
    except Exception as raised:
        error = raised
    seconds = loop.time()
    await runtime.close()
    return Outcome(controller, watcher, learner, source, controller.state, error, seconds)


def assert_laws(plan: Plan, outcome: Outcome) -> None:
    """The laws that every schedule keeps, however it went."""
    ledger, controller = outcome.controller.ledger, outcome.controller
    assert ledger.submitted == ledger.trained + sum(ledger.dropped.values()), "a lease has no end"
    assert not ledger.in_flight and not controller.producing and not controller.buffer.store.scan()
    assert sum(ledger.dropped.values()) == sum(outcome.watcher.drops.values())
    if outcome.error is None:
        assert controller.versions.version == len(outcome.learner.batches) == controller.step
        assert ledger.trained == sum(map(len, outcome.learner.batches))
        assert outcome.learner.published == sorted(set(outcome.learner.published)), "a version was published twice"
        assert outcome.controller.weight_sync.live_version == controller.versions.version
    for trained_at, batch in enumerate(outcome.learner.batches):
        for group in batch:
            _assert_group(plan, group, trained_at)


def _assert_group(plan: Plan, group: Group, version: int) -> None:
    assert (plan.min_complete or plan.group_size) <= group.size <= plan.group_size
    assert len(group.scores) == group.size
    if plan.max_version_lag is not None:
        assert version - group.oldest_version <= plan.max_version_lag
    for episode in group.episodes:
        for sample in episode.samples:
            sampled = sample.loss_mask.astype(bool)
            assert 0 < sampled.sum() <= 64, "one budget over all resumptions"
            stamped = sample.policy_versions[sampled]
            assert (stamped >= 0).all() and (stamped <= version).all(), "a token of a version that was not live"
            assert (np.diff(stamped) >= 0).all(), "versions only grow within a generation"
            assert (sample.policy_versions[~sampled] == -1).all()
