"""A config with an [env] into the parts of its run: actors in place of engines, trajectories in place of groups.

Buffer, ledger, dispatcher, weight sync, channels, controller and narrator are those of every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from headrace.config import RunConfig, stays_on_device
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.replay import ReplayBuffer
from headrace.orchestrator.dispatcher import EngineSlot
from headrace.orchestrator.evaluate import EpisodeEvaluator
from headrace.orchestrator.learner import ControlLearner, TensorLearner
from headrace.orchestrator.parts import Flow, Parts, RunOrder
from headrace.protocols import Resources, Store, TaskSource
from headrace.rollout.control_rollout import ControlRollout, build_actor
from headrace.rollout.sources.trajectories import TrajectorySource
from headrace.types import Trajectory


class ControlWork:
    def __init__(self, order: RunOrder) -> None:
        self.config = order.config

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
        spawn = actor_spawner(config, flow)
        names = [f"engine-{n}" for n in range(config.rollout.engine.count)]
        backend, *slots = await asyncio.gather(spawn_trainer(config, flow), *(spawn(name) for name in names))
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


def actor_spawner(config: RunConfig, flow: Flow) -> Callable[[str], Awaitable[EngineSlot]]:
    # Environments of a restored run begin new episodes: with the old seeds they would repeat those of the start.
    arguments = (config.env, config.policy, flow.channel, config.seed + 7919 * flow.buffer.incarnation)

    build: Any = build_actor
    if config.env.workers:
        from headrace.rollout.policy_worker import build_policy_worker as build
    elif stays_on_device(config):
        from headrace.rollout.tensor_rollout import build_tensor_actor as build

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


def learner(config: RunConfig, backend: Any, buffer: LeaseBuffer) -> ControlLearner:
    if isinstance(buffer, ReplayBuffer):
        from headrace.orchestrator.replay_learner import ReplayLearner

        return ReplayLearner(backend, buffer, config.replay, config.env.target_return, config.training.steps)
    kind = TensorLearner if stays_on_device(config) else ControlLearner
    return kind(backend, config.algorithm.gamma, config.env.target_return)


async def spawn_trainer(config: RunConfig, flow: Flow) -> Any:
    more: tuple[Any, ...] = ()
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
