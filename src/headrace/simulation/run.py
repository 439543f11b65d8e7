"""A run's config and a cluster's costs into a finished simulated run: controller, dispatcher, buffer, staleness, interruption
and partial rollouts are the production code; engines, trainer, scorer, store and runtime cost time alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.config import RunConfig, resolve
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.config import steps_ahead
from headrace.exchange.interruption import INTERRUPTIONS
from headrace.exchange.ledger import Ledger
from headrace.exchange.staleness import Capacity, VersionLine
from headrace.exchange.stores.memory import MemoryStore
from headrace.orchestrator.controller import Controller
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.flow import FlowSettings
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.orchestrator.turns import Turns
from headrace.orchestrator.weight_sync import WeightSync
from headrace.protocols import Lease, Store, TaskSource
from headrace.rollout.config import GroupConfig
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.rollout.partial import PARTIAL_POLICIES
from headrace.rollout.sources.length_buckets import LengthBuckets
from headrace.rollout.token_rollout import TokenRollout
from headrace.simulation.cluster import ClusterConfig, with_workload
from headrace.simulation.parts import (
    LearnerCosts,
    NumberedTasks,
    OneTurn,
    ScoreCosts,
    TimedLearner,
    TimedScorer,
    Watcher,
    build_flaky,
    drops_zero_variance,
)
from headrace.types import SamplingParams, Unit


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Everything that a simulated run is made of. Everything random follows from `seed`."""

    settings: FlowSettings
    capacity: Capacity
    costs: ScriptedCosts
    learner: TimedLearner
    seed: int = 0
    engines: int = 1
    group: GroupConfig = field(default_factory=GroupConfig)
    max_tokens: int = 64
    interruption: str = "never"
    partial: str = "continue"
    max_version_lag: int | None = None
    on_stale: str = "drop"
    cancel_group: bool = False
    colocated: bool = False
    scores: ScoreCosts = field(default_factory=ScoreCosts)
    lose_replies: float = 0.0
    restart_s: float = 2.0
    generate_timeout_s: float = 10.0
    rejoin_timeout_s: float = 60.0
    prepare_timeout_s: float = 5.0
    commit_timeout_s: float = 5.0
    drain_timeout_s: float = 60.0
    source: TaskSource = field(default_factory=NumberedTasks)
    store: Store = field(default_factory=MemoryStore)
    watcher: Watcher = field(default_factory=Watcher)
    for_s: float | None = None
    """Stop after so many simulated seconds."""
    slow_share: float = 0.0
    """Share of engines that take ten times as long."""
    duplicates: float = 0.0
    """Share of units that are handed in a second time."""
    restore: Callable[[LeaseBuffer], int] = lambda buffer: 0
    """Brings the buffer to a checkpoint's state and says its step."""
    faults: Callable[[asyncio.AbstractEventLoop, Controller, list[Any]], None] = lambda loop, controller, engines: None
    """Sets timers for what goes wrong; `engines` grows as replacements come."""


@dataclass
class Outcome:
    """How it went; an error of the run is in it, a broken law is raised. wall_s: real seconds that it took."""

    flow: Flow
    controller: Controller
    engines: list[Any]
    state: str
    error: BaseException | None
    seconds: float
    wall_s: float


def simulate_flow(flow: Flow) -> Outcome:
    """Run it to its end on a virtual clock of its own."""
    started = time.perf_counter()
    outcome = run_simulated(run_flow(flow))
    outcome.wall_s = time.perf_counter() - started
    return outcome


async def run_flow(flow: Flow) -> Outcome:
    """Run it to its end on the clock of the loop that this is awaited in."""
    loop = asyncio.get_running_loop()
    runtime = LocalRuntime(flow.watcher.event)
    buffer = LeaseBuffer(
        flow.source,
        flow.store,
        Ledger(),
        VersionLine(),
        flow.capacity,
        max_version_lag=flow.max_version_lag,
        on_stale=flow.on_stale,
    )
    buffer.on_put = getattr(flow.source, "observe", buffer.on_put)
    step = flow.restore(buffer)
    dispatcher = Dispatcher(generate_timeout_s=flow.generate_timeout_s, rejoin_timeout_s=flow.rejoin_timeout_s)
    dispatcher.oldest = {} if flow.cancel_group else None
    environment, rng = OneTurn(), random.Random(f"faults {flow.seed}")
    rollout = TokenRollout(
        dispatcher,
        lambda: environment,
        TimedScorer(flow.scores, flow.seed),
        sampling=SamplingParams(max_tokens=flow.max_tokens),
        group=flow.group,
        partial=PARTIAL_POLICIES[flow.partial],
        open_time=dispatcher.open_time,
        seed=flow.seed,
        incarnation=buffer.incarnation,
    )

    async def scored() -> None:
        while rollout.scoring:
            await asyncio.sleep(0.01)

    sync = WeightSync(
        dispatcher,
        INTERRUPTIONS[flow.interruption],
        prepare_timeout_s=flow.prepare_timeout_s,
        commit_timeout_s=flow.commit_timeout_s,
        drain_timeout_s=flow.drain_timeout_s,
        scoring=scored,
    )
    engines: list[Any] = []

    async def started(name: str) -> EngineSlot:
        own = random.Random(rng.random())
        costs = slowed(flow.costs) if own.random() < flow.slow_share else flow.costs
        proxy = await runtime.spawn(name, build_flaky, costs, flow.lose_replies, own, engines)
        return EngineSlot(name, proxy, together=True)

    async def restarted(name: str) -> EngineSlot:
        await asyncio.sleep(flow.restart_s)
        return await started(name)

    async def rolled_out(lease: Lease) -> Unit:
        unit = await rollout(lease)
        if rng.random() < flow.duplicates:
            loop.call_later(1.0, buffer.put, lease, unit)
        return unit

    for number in range(flow.engines):
        dispatcher.join(await started(f"engine-{number}"))
    controller = Controller(
        flow.settings,
        buffer,
        dispatcher,
        sync,
        rolled_out if flow.duplicates else rollout,
        flow.learner,
        flow.watcher,
        spawn_engine=restarted,
        turns=Turns(sync, flow.learner) if flow.colocated else None,
        step=step,
    )
    flow.faults(loop, controller, engines)
    if flow.for_s is not None:
        loop.call_at(flow.for_s, controller.request_stop)
    error: BaseException | None = None
    try:
        await controller.run()
    except Exception as raised:
        error = raised
    seconds = loop.time()
    await runtime.close()
    return Outcome(flow, controller, engines, controller.state, error, seconds, 0.0)


def slowed(costs: ScriptedCosts) -> ScriptedCosts:
    rates = tuple((count, rate / 10) for count, rate in costs.rates)
    return replace(costs, token_s=10 * costs.token_s, token_s_each=10 * costs.token_s_each, rates=rates)


# ----------------------------------------------------------------------------------------------- from a run's config


def simulate(
    config: RunConfig, cluster: ClusterConfig, *, for_s: float | None = None, keep: bool = True
) -> tuple[RunConfig, Outcome]:
    """The run that `config` describes on `cluster`, and the config with the cluster's sizes; `for_s` simulated seconds, or
    all its steps. keep: remember every event."""
    config = prepared(config, cluster)
    return config, simulate_flow(flow_of(config, cluster, for_s=for_s, keep=keep))


def prepared(config: RunConfig, cluster: ClusterConfig) -> RunConfig:
    """Resolved, with the cluster's sizes."""
    return resolve(with_workload(config, cluster))


def flow_of(config: RunConfig, cluster: ClusterConfig, *, for_s: float | None = None, keep: bool = True) -> Flow:
    """A config that is resolved and has the cluster's sizes, as a flow."""
    work, failures, training = cluster.workload, cluster.failures, config.training
    transport = cluster.transport_of(config.weights.channel)
    settings = FlowSettings(
        batch=training.groups,
        steps=training.steps if for_s is None else 10**9,
        every_steps=config.weights.every_steps,
        refill_limit=training.advantage.refill_limit,
        stream_groups=training.stream_groups,
        stall_warning_s=config.limits.stall_warning_s,
        stall_stop_s=config.limits.stall_stop_s,
        max_dropped=config.limits.max_dropped,
        restarts=config.limits.restarts,
    )
    learner = TimedLearner(
        LearnerCosts(
            tokens_per_s=cluster.training.tokens_per_s,
            step_s=cluster.training.step_s,
            prompt_tokens=work.prompt_tokens,
            grain=work.grain,
            publish_s=transport.publish_s,
            offload_s=cluster.training.offload_s,
        ),
        drops_zero_variance if training.advantage.drop_zero_variance else lambda units: [False] * len(units),
    )
    source: TaskSource = NumberedTasks(distinct=work.tasks)
    if config.rollout.order == "length_bucket":
        source = LengthBuckets(source, training.groups, config.seed)
    longest_s = work.max_tokens / work.grain * cluster.costs(config.weights.channel).step_s(1)
    return Flow(
        settings=settings,
        capacity=Capacity(
            batch=training.groups,
            ahead=steps_ahead(config.buffer, config.staleness),
            oversample=config.rollout.oversample,
            max_in_flight=config.rollout.max_in_flight,
        ),
        costs=cluster.costs(config.weights.channel),
        learner=learner,
        seed=config.seed,
        engines=cluster.generation.engines,
        group=config.group,
        max_tokens=config.rollout.sampling.max_tokens,
        interruption=config.weights.interruption,
        partial=config.weights.partial,
        max_version_lag=config.staleness.max_version_lag,
        on_stale=config.staleness.on_stale,
        cancel_group=config.staleness.cancel_group,
        colocated=config.placement == "colocated",
        scores=ScoreCosts(
            score_s=work.score_s,
            sigma=work.score_sigma,
            fails=failures.failed_scores,
            hard=work.hard,
            easy=work.easy,
        ),
        lose_replies=failures.lost_replies,
        restart_s=failures.restart_s,
        generate_timeout_s=config.rollout.generate_timeout_s,
        rejoin_timeout_s=max(config.weights.rejoin_timeout_s, 10 * failures.restart_s),
        prepare_timeout_s=max(config.weights.prepare_timeout_s, 10 * transport.prepare_s),
        commit_timeout_s=max(config.weights.commit_timeout_s, 10 * transport.commit_s),
        # A real cluster's drain lasts as long as its longest answer.
        drain_timeout_s=max(config.weights.drain_timeout_s, 100 * longest_s),
        source=source,
        watcher=Watcher(keep=keep, grain=work.grain),
        for_s=for_s,
        faults=deaths(failures.engine_mtbf_s, config.seed),
    )


def deaths(mean_s: float, seed: int) -> Callable[[asyncio.AbstractEventLoop, Controller, list[Any]], None]:
    """Engines that die at random, each once in `mean_s` seconds on average."""
    rng = random.Random(f"deaths {seed}")
    killing: list[Any] = []

    def start(loop: asyncio.AbstractEventLoop, controller: Controller, engines: list[Any]) -> None:
        def kill() -> None:
            if live := controller.dispatcher.live():
                killing[:] = [asyncio.ensure_future(rng.choice(live).proxy.kill())]
            loop.call_later(rng.expovariate(max(1, len(live)) / mean_s), kill)

        if mean_s:
            loop.call_later(rng.expovariate(max(1, len(controller.dispatcher.live())) / mean_s), kill)

    return start
