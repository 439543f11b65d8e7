"""A config with an [env] into the parts of its run: actors in place of engines, trajectories in place of groups.

Buffer, ledger, dispatcher, weight sync, channels, controller and narrator are those of every run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from headrace.config import RunConfig, stays_on_device
from headrace.errors import MissingExtra
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.replay import ReplayBuffer
from headrace.orchestrator.dispatcher import EngineSlot
from headrace.orchestrator.evaluate import EpisodeEvaluator
from headrace.orchestrator.learner import ControlLearner, TensorLearner
from headrace.orchestrator.parts import Flow, Parts, RunOrder
from headrace.policies.shared_pass import SharedPass
from headrace.protocols import Resources, Store, TaskSource
from headrace.rollout.control_rollout import ControlRollout, build_actor
from headrace.rollout.sources.trajectories import TrajectorySource
from headrace.types import Trajectory


class ControlWork:
    def __init__(self, order: RunOrder, say: Callable[[str], None]) -> None:
        self.config, self.say = order.config, say

    async def open_source(self) -> TaskSource:
        return TrajectorySource(self.config.env.id)

    def replay(self) -> tuple[Callable[..., LeaseBuffer], Store] | None:
        if self.config.algorithm.kind not in ("dqn", "sac"):
            return None
        from headrace.exchange.stores.replay import ReplayStore

        replay = self.config.replay
        store = ReplayStore(replay.capacity, exponent=replay.priority, seed=self.config.seed)
        return partial(ReplayBuffer, save=replay.save), store

    async def parts(self, flow: Flow) -> Parts:
        """Actors say what their environments show and take; the trainer builds its network from that."""
        config = self.config
        shared = SharedPass() if acts_by_the_trainers_pass(config) else None
        if config.rollout.source == "redis":
            names, spawn = ["engine-0"], pool_spawner(config, flow, self.say)
        else:
            names = [f"engine-{n}" for n in range(config.rollout.engine.count)]
            spawn = actor_spawner(config, flow, shared)
        backend, *slots = await asyncio.gather(spawn_trainer(config, flow, shared), *(spawn(name) for name in names))
        await backend.begin(await slots[0].proxy.describe())
        if flow.restored is not None:
            await backend.load(str(flow.restored.model_folder))
        for slot in slots:
            flow.dispatcher.join(slot)
        return Parts(
            rollout=ControlRollout(flow.dispatcher, retries=config.group.retries, incarnation=flow.buffer.incarnation),
            learner=learner(config, backend, flow.buffer),
            spawn_engine=spawn,
            backend=backend,
            describe=describe_trajectory,
            evaluator=evaluator(config, flow),
            names=("episodes", "steps", "trajectories"),
        )


def seed_of(config: RunConfig, flow: Flow) -> int:
    """Environments of a restored run begin new episodes: with the old seeds they would repeat those of the start."""
    return config.seed + 7919 * flow.buffer.incarnation


def actor_spawner(
    config: RunConfig, flow: Flow, shared: SharedPass | None = None
) -> Callable[[str], Awaitable[EngineSlot]]:
    """How to spawn one of this run's own."""
    arguments: tuple[Any, ...] = (config.env, config.policy, flow.channel, seed_of(config, flow))
    if shared is not None:
        arguments = (*arguments, shared)
    build: Any = build_actor
    if config.env.workers:
        from headrace.rollout.policy_worker import build_policy_worker as build
    elif stays_on_device(config):
        from headrace.rollout.tensor_rollout import build_tensor_actor as build
    replayed = isinstance(flow.buffer, ReplayBuffer)
    if config.buffer.store == "shared_memory" and config.runtime == "processes" and not replayed:
        from headrace.orchestrator.placing import build_placing

        build, arguments = build_placing, (build, *arguments)

    async def spawn(name: str) -> EngineSlot:
        resources = Resources(threads=config.rollout.engine.threads)
        return EngineSlot(name, await flow.runtime.spawn(name, build, *arguments, resources=resources))

    return spawn


def evaluator(config: RunConfig, flow: Flow) -> EpisodeEvaluator | None:
    evaluation = config.evaluation
    if not evaluation.source or not evaluation.count:
        return None
    return EpisodeEvaluator(
        flow.dispatcher,
        count=evaluation.count,
        sampled=evaluation.sampled,
        seed=config.seed,
        retries=config.group.retries,
    )


def pool_spawner(config: RunConfig, flow: Flow, say: Callable[[str], None]) -> Callable[[str], Awaitable[EngineSlot]]:
    """How to open the one front of all actors that others start. It lives in this process, whatever the runtime."""
    try:
        from headrace.orchestrator.remote.pool import PoolPlan, build_pool, end_board
    except ImportError:
        raise MissingExtra("redis", "redis", 'rollout.source = "redis"') from None
    from headrace.orchestrator.runtimes.local import LocalRuntime

    plan = PoolPlan(
        session=secrets.token_hex(8),
        url=config.buffer.url,
        run=config.name,
        env=config.env,
        policy=config.policy,
        seed=seed_of(config, flow),
        step_timeout_s=config.rollout.generate_timeout_s,
        wait_s=config.limits.stall_stop_s,
        resumed=flow.restored is not None,
    )
    runtime = LocalRuntime(flow.record)
    flow.stack.push_async_callback(asyncio.to_thread, end_board, plan)
    flow.stack.push_async_callback(runtime.close)

    async def spawn(name: str) -> EngineSlot:
        nonlocal plan
        slot = EngineSlot(name, await runtime.spawn(name, build_pool, plan, flow.channel, say))
        plan = msgspec.structs.replace(plan, resumed=True)  # one that takes its place goes on with its actors
        return slot

    return spawn


def learner(config: RunConfig, backend: Any, buffer: LeaseBuffer) -> ControlLearner:
    if isinstance(buffer, ReplayBuffer):
        from headrace.orchestrator.replay_learner import ReplayLearner

        return ReplayLearner(backend, buffer, config.replay, config.env.target_return, config.training.steps)
    kind = TensorLearner if stays_on_device(config) else ControlLearner
    return kind(backend, config.algorithm.gamma, config.env.target_return)


def acts_by_the_trainers_pass(config: RunConfig) -> bool:
    """Whether a batch is one trajectory that is updated on once, in the process and under the weights that acted it out."""
    training, engine = config.training, config.rollout.engine
    alone = (
        config.runtime == "local"
        and config.placement == "sync"
        and config.rollout.source == "engine"
        and engine.count == training.groups == 1
    )
    once = training.epochs == training.minibatches == 1 and config.weights.every_steps == 1
    plain = config.policy.kind == "actor_critic" and config.policy.recurrent == "none"
    return alone and once and plain and not config.env.workers and not stays_on_device(config)


async def spawn_trainer(config: RunConfig, flow: Flow, shared: SharedPass | None = None) -> Any:
    more: tuple[Any, ...] = () if shared is None else (shared,)
    match config.algorithm.kind:
        case "dqn" | "sac":
            from headrace.training.backends.replay_device import build_replay_device as build
        case _ if stays_on_device(config):
            from headrace.training.backends.tensor_device import build_tensor_device as build

            more = (config.env.device,)
        case _:
            from headrace.training.backends.control_device import build_control_device as build
    return await flow.runtime.spawn(
        "trainer",
        build,
        config.training,
        config.algorithm,
        config.policy,
        flow.channel,
        config.seed,
        *more,
        resources=Resources(threads=config.training.threads),
    )


def describe_trajectory(trajectory: Trajectory) -> str:
    """The episodes that ended in a trajectory, in a line."""
    returns, lengths = trajectory.episode_returns, trajectory.episode_lengths
    if not len(returns):
        return f"{trajectory.size} steps, in which no episode ended"
    last = f"the last returned {returns[-1]:g} after {lengths[-1]} steps"
    return f"{trajectory.size} steps, in which {len(returns)} episodes ended; {last}"
