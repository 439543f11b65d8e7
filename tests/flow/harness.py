"""A random schedule as a `Plan`, run by the simulator with faults on demand, and the laws that every schedule keeps."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import TrainingFailed, WorkerDied
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.codec import encode
from headrace.exchange.staleness import Capacity
from headrace.orchestrator.checkpoint import Restored, capture, restore
from headrace.orchestrator.controller import Controller
from headrace.orchestrator.flow import FlowSettings
from headrace.rollout.config import GroupConfig
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.simulation.parts import LearnerCosts, NumberedTasks, ScoreCosts, TimedLearner, Watcher
from headrace.simulation.run import Flow, simulate_flow
from headrace.types import Event, Group, Metrics


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
    slow_share: float = 0.0
    duplicates: float = 0.0
    checkpoint_every: int = 0
    crash_at: int = 0
    """The trainer dies in its so manieth batch; 0: never."""
    stop_at_s: float | None = None
    max_dropped: int = 10_000
    restarts: int = 20
    rejoin_timeout_s: float = 60.0
    drain_timeout_s: float = 60.0
    stall_stop_s: float = 2000.0


class RecordingLearner(TimedLearner):
    """A step takes `train_s` whatever its tokens; keeps every batch; drops a share of the groups at random."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed + 2)
        super().__init__(
            LearnerCosts(step_s=0.0 if plan.stream_groups else plan.train_s, publish_s=0.05, offload_s=0.2),
            self._drops,
        )
        self.batches: list[list[Group]] = []
        self.tried = 0

    def _drops(self, units: Sequence[Any]) -> list[bool]:
        return [self.rng.random() < self.plan.drop_share for _ in units]

    def _seconds(self, units: Sequence[Any]) -> float:
        return self.plan.train_s * len(units) / self.plan.batch if self.plan.stream_groups else 0.0

    async def train(self, units: Sequence[Any]) -> Metrics:
        metrics = await super().train(units)
        self.tried += 1
        if self.tried == self.plan.crash_at:
            raise WorkerDied("the trainer's process is gone")
        self.batches.append(list(units))
        return metrics


@dataclass
class Outcome:
    controller: Controller
    watcher: Watcher
    learner: RecordingLearner
    source: NumberedTasks
    state: str
    error: BaseException | None
    seconds: float

    @property
    def log(self) -> list[Event]:
        return self.watcher.events


def simulate(plan: Plan) -> Outcome:
    """Run the plan on a virtual clock; an error of the run is in the outcome, a broken law is raised."""
    watcher, source, learner = Watcher(), NumberedTasks(plan.tasks), RecordingLearner(plan)
    outcome = simulate_flow(flow_of(plan, watcher, source, learner))
    return Outcome(outcome.controller, watcher, learner, source, outcome.state, outcome.error, outcome.seconds)


def simulate_crash(plan: Plan, folder: Path) -> tuple[Outcome, Outcome | None, dict[str, Any]]:
    """The run up to its trainer's death, its continuation from the last checkpoint if there is one, and that checkpoint."""
    saved: dict[str, Any] = {}

    async def keep(controller: Controller) -> None:
        saved["flow"], units = capture(controller.buffer, controller.step)
        saved["units"] = [encode(unit) for unit in units]
        saved["trained"] = controller.ledger.trained + controller.ledger.count("trained")

    watcher, source, learner = Watcher(on_checkpoint=keep), NumberedTasks(plan.tasks), RecordingLearner(plan)
    first = simulate_flow(flow_of(plan, watcher, source, learner))
    before = Outcome(first.controller, watcher, learner, source, first.state, first.error, first.seconds)
    if not isinstance(first.error, TrainingFailed) or not saved:
        return before, None, saved
    (folder / "units").mkdir(parents=True, exist_ok=True)
    for number, unit in enumerate(saved["units"]):
        (folder / "units" / f"{number}.unit").write_bytes(unit)
    flow = json.loads(json.dumps(saved["flow"]))

    def bring_back(buffer: LeaseBuffer) -> int:
        restore(Restored(folder, int(flow["step"]), flow), buffer, buffer.versions, max(before.watcher.written))
        saved["room"] = buffer.room()
        return int(flow["step"])

    plan = replace(plan, crash_at=0, kills_s=(), hang_s=(), stop_at_s=None)
    watcher, source, learner = Watcher(), NumberedTasks(plan.tasks), RecordingLearner(plan)
    second = simulate_flow(replace(flow_of(plan, watcher, source, learner), restore=bring_back))
    after = Outcome(second.controller, watcher, learner, source, second.state, second.error, second.seconds)
    return before, after, saved


def flow_of(plan: Plan, watcher: Watcher, source: NumberedTasks, learner: RecordingLearner) -> Flow:
    return Flow(
        slow_share=plan.slow_share,
        duplicates=plan.duplicates,
        settings=FlowSettings(
            checkpoint_every=plan.checkpoint_every,
            batch=plan.batch,
            steps=plan.steps,
            every_steps=plan.every_steps,
            refill_limit=plan.refill_limit,
            stream_groups=plan.stream_groups,
            stall_stop_s=plan.stall_stop_s,
            max_dropped=plan.max_dropped,
            restarts=plan.restarts,
        ),
        capacity=Capacity(
            batch=plan.batch, ahead=plan.ahead, oversample=plan.oversample, max_in_flight=plan.max_in_flight
        ),
        costs=plan.costs,
        learner=learner,
        seed=plan.seed,
        engines=plan.engines,
        group=GroupConfig(
            size=plan.group_size, min_complete=plan.min_complete, timeout_s=plan.group_timeout_s, retries=plan.retries
        ),
        interruption=plan.interruption,
        partial=plan.partial,
        max_version_lag=plan.max_version_lag,
        on_stale=plan.on_stale,
        cancel_group=plan.cancel_group,
        colocated=plan.colocated,
        scores=ScoreCosts(score_s=plan.score_s, fails=plan.score_fails),
        lose_replies=plan.lose_replies,
        rejoin_timeout_s=plan.rejoin_timeout_s,
        drain_timeout_s=plan.drain_timeout_s,
        source=source,
        watcher=watcher,
        for_s=plan.stop_at_s,
        faults=faults_of(plan),
    )


def faults_of(plan: Plan) -> Any:
    rng, killing = random.Random(plan.seed + 3), []

    def start(loop: asyncio.AbstractEventLoop, controller: Controller, engines: list[Any]) -> None:
        def kill_one() -> None:
            if live := controller.dispatcher.live():
                killing.append(asyncio.ensure_future(rng.choice(live).proxy.kill()))

        def hang_one() -> None:
            if engines:
                rng.choice(engines).hung = True

        for moment in plan.kills_s:
            loop.call_at(moment, kill_one)
        for moment in plan.hang_s:
            loop.call_at(moment, hang_one)

    return start


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
