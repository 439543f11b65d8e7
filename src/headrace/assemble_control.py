"""A config with an [env] into the parts of its run: actors in place of engines, trajectories in place of groups.

Buffer, ledger, dispatcher, weight sync, channels, controller and narrator are those of every run.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.config import RunConfig, stays_on_device
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.replay import ReplayBuffer
from headrace.orchestrator.checkpoint import Restored
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.learner import ControlLearner, TensorLearner
from headrace.orchestrator.parts import Parts
from headrace.protocols import Resources, Runtime
from headrace.rollout.control_rollout import ControlRollout, build_actor
from headrace.types import Trajectory


async def control_parts(
    config: RunConfig,
    runtime: Runtime,
    dispatcher: Dispatcher,
    channel: Any,
    restored: Restored | None,
    buffer: LeaseBuffer,
) -> Parts:
    """Actors say what their environments show and take; the trainer builds its network from that."""
    # Environments of a restored run begin new episodes: with the old seeds they would repeat those of the start.
    arguments = (config.env, config.policy, channel, config.seed + 7919 * buffer.incarnation)

    build: Any = build_actor
    if config.env.workers:
        from headrace.rollout.policy_worker import build_policy_worker as build
    elif stays_on_device(config):
        from headrace.rollout.tensor_rollout import build_tensor_actor as build

    async def spawn(name: str) -> EngineSlot:
        resources = Resources(threads=config.rollout.engine.threads)
        return EngineSlot(name, await runtime.spawn(name, build, *arguments, resources=resources))

    names = [f"engine-{n}" for n in range(config.rollout.engine.count)]
    backend, *slots = await asyncio.gather(_trainer(config, runtime, channel), *(spawn(name) for name in names))
    await backend.begin(await slots[0].proxy.describe())
    if restored is not None:
        await backend.load(str(restored.model_folder))
    for slot in slots:
        dispatcher.join(slot)
    return Parts(
        rollout=ControlRollout(dispatcher, retries=config.group.retries, incarnation=buffer.incarnation),
        learner=_learner(config, backend, buffer),
        spawn_engine=spawn,
        backend=backend,
        describe=describe_trajectory,
        names=("episodes", "steps", "trajectories"),
    )


def _learner(config: RunConfig, backend: Any, buffer: LeaseBuffer) -> ControlLearner:
    if isinstance(buffer, ReplayBuffer):
        from headrace.orchestrator.replay_learner import ReplayLearner

        return ReplayLearner(backend, buffer, config.replay, config.env.target_return, config.training.steps)
    kind = TensorLearner if stays_on_device(config) else ControlLearner
    return kind(backend, config.algorithm.gamma, config.env.target_return)


async def _trainer(config: RunConfig, runtime: Runtime, channel: Any) -> Any:
    more: tuple[Any, ...] = ()
    match config.algorithm.kind:
        case "dqn" | "sac":
            from headrace.training.backends.replay_device import build_replay_device as build
        case _ if stays_on_device(config):
            from headrace.training.backends.tensor_device import build_tensor_device as build

            more = (config.env.device,)
        case _:
            from headrace.training.backends.control_device import build_control_device as build
    return await runtime.spawn(
        "trainer",
        build,
        config.training,
        config.algorithm,
        config.policy,
        channel,
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
