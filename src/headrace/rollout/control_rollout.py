"""Turns steps of vector environments into trajectories: the actor that steps and acts, and the rollout that asks actors.

An actor answers `generate` as a text engine does, so that dispatcher, weight sync and watchdog serve both: a request is
one trajectory, and progress is counted in steps.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
import torch

from headrace.cores import threads_for
from headrace.errors import HeadraceError, PartFailed, RolloutDropped
from headrace.policies.config import PolicyConfig
from headrace.policies.shared_pass import Passes, SharedPass
from headrace.policies.spaces import Spaces
from headrace.protocols import Lease, TrajectoryRequest, WeightChannel, WorkerContext
from headrace.rollout.acting import Acting, mix_seed, refuse_what_is_not_finite
from headrace.rollout.config import EnvConfig
from headrace.rollout.engines.policy_network import PolicyNetworkEngine
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment
from headrace.types import Array, Episodes, RequestKey, Trajectory


def build_actor(
    context: WorkerContext,
    env: EnvConfig,
    policy: PolicyConfig,
    channel: WeightChannel | None,
    seed: int,
    shared: SharedPass | None = None,
) -> Actor:
    """Environments and a policy copy. The name's last part is the actor's number."""
    if context.resources.threads:
        torch.set_num_threads(context.resources.threads)
    return Actor(context, env, policy, channel, seed, shared)


class Actor(Acting):
    """Steps its environments with its own copy of the policy, one trajectory after the other.

    An environment that raises, or shows what is not finite or of another shape, fails the request; all environments are
    then made anew for the next one, since nobody knows what state they are in.

    shared: where to leave the passes that it acts by, made with the trainer's own network, whose weights are the same
    """

    def __init__(
        self,
        context: WorkerContext,
        env: EnvConfig,
        policy: PolicyConfig,
        channel: WeightChannel | None,
        seed: int,
        shared: SharedPass | None = None,
    ) -> None:
        self._shared = shared
        self.env, self.seed, self.index = env, seed, int(context.name.rpartition("-")[2])
        self.makes = 0
        self.environments: VectorEnvironment | None = self._make()
        super().__init__(context, env, self._make_engine(policy, channel))
        self._begin_episodes()

    # ------------------------------------------------------------------------------------------------ trajectories

    async def generate(self, request: TrajectoryRequest) -> Trajectory | Episodes:
        """One trajectory, or whole episodes. Raises `PartFailed` for an environment that misbehaves."""
        if request.episodes is not None:
            return await self.play(request)
        self._requests[request.request_id] = 0
        try:
            async with self._lock:
                if request.request_id in self._aborted:
                    raise PartFailed(f"{request.request_id} was aborted")
                return await self._collect(request)
        finally:
            self._requests.pop(request.request_id, None)
            self._aborted.discard(request.request_id)
            if not self._requests:
                self._flush_work()

    async def _collect(self, request: TrajectoryRequest) -> Trajectory:
        began = time.monotonic_ns()
        try:
            if self.environments is None:
                self.environments = self._make()
                self._begin_episodes()
            return await self._record_trajectory(request)
        except HeadraceError:
            self._give_environments_up()
            raise
        except Exception as error:
            self._give_environments_up()
            raise PartFailed(f"{self.env.id} failed: {type(error).__name__}: {error}") from error
        finally:
            self.record_work(began)

    async def _record_trajectory(self, request: TrajectoryRequest) -> Trajectory:
        changes = self._shared.changes if self._shared is not None else 0
        with threads_for(self.engine.multiplications * self.env.count):
            recorded = await self._loop(request)
        trajectory = self._trajectory(request, recorded)
        refuse_what_is_not_finite(self.env.id, trajectory)
        if self._shared is not None and recorded.passes:
            self._shared.keep(changes, recorded.passes, trajectory.behavior_logprobs)
        return trajectory

    async def _loop(self, request: TrajectoryRequest) -> Recording:
        """`env.steps` steps. The other calls to this actor get their turn now and then."""
        environments, engine = self.environments, self.engine
        assert environments is not None
        to_environment, step = engine.distribution.to_environment, environments.step
        recorded = Recording(self.engine.spaces, self.env.steps, environments.count, engine.distribution.size)
        recorded.show(0, self._observations)
        noise = engine.noise(self.env.steps, environments.count)
        state = self._state
        recorded.initial_state = {name: value.numpy().copy() for name, value in state.items()}
        for t in range(self.env.steps):
            actions, outputs, state = self._act(recorded, t, state, noise[t])
            recorded.act(t, actions, outputs, engine.version)
            result = step(to_environment(recorded.actions[t]))
            recorded.step(t, result)
            state = self._count(recorded, t, result, state)
            await self._give_way(request.request_id, t)
        self._observations, self._state = recorded.last(), state
        return recorded

    def _act(self, recorded: Recording, t: int, state: Any, noise: torch.Tensor) -> Any:
        """Actions, outputs and the next state of a step."""
        if self._shared is None or self._shared.network is None:
            return self.engine.step(recorded.shown(t), state, noise)
        recorded.passes.append(self._shared.evaluate(recorded.shown(t)))
        outputs = recorded.passes[-1][0].detach()
        return self.engine.distribution.sample(outputs, noise), outputs, state

    def _count(self, recorded: Recording, t: int, result: Any, state: Any) -> Any:
        """Episode statistics, and a state that is zero where an episode begins."""
        self._steps += self.env.count
        self._returns += result.rewards
        self._lengths += result.valid
        done = result.terminated | result.truncated
        over = done.any()
        if over:
            recorded.returns.append(self._returns[done])
            recorded.lengths.append(self._lengths[done])
            self._returns[done], self._lengths[done] = 0.0, 0
        if state:
            begins = done if self.environments.mode != "next_step" else ~result.valid  # type: ignore[union-attr]
            if begins.any():
                keep = torch.from_numpy(~begins).to(torch.float32)[:, None]
                state = {name: value * keep for name, value in state.items()}
        return state

    def _trajectory(self, request: TrajectoryRequest, recorded: Recording) -> Trajectory:
        logprobs = self.engine.distribution.logprobs(recorded.outputs, recorded.action_tensor).numpy()
        clip = self.env.reward_clip
        rewards = np.clip(recorded.rewards, -clip, clip) if clip else recorded.rewards
        return Trajectory(
            sample_id=request.key.lease_id,
            observations=recorded.observations,
            actions=recorded.actions,
            rewards=rewards,
            terminated=recorded.terminated,
            truncated=recorded.truncated,
            valid=recorded.valid,
            behavior_logprobs=logprobs,
            policy_versions=recorded.versions,
            ended=recorded.ended(),
            final_observations=recorded.final_observations(),
            episode_returns=np.concatenate(recorded.returns) if recorded.returns else np.zeros(0, np.float32),
            episode_lengths=np.concatenate(recorded.lengths) if recorded.lengths else np.zeros(0, np.int64),
            initial_state=recorded.initial_state or None,
        )

    # ----------------------------------------------------------------------------------------------- environments

    def _make(self) -> VectorEnvironment:
        """Environments with seeds of their own, also when they are made again."""
        self.makes += 1
        return VectorEnvironment(self.env, seed=mix_seed(self.seed, self.makes), index=self.index)

    def _make_engine(self, policy: PolicyConfig, channel: WeightChannel | None) -> PolicyNetworkEngine:
        assert self.environments is not None
        return PolicyNetworkEngine(self.environments.spaces, policy, channel, mix_seed(self.seed, self.index))

    def _begin_episodes(self) -> None:
        assert self.environments is not None
        self._observations = {name: leaf.copy() for name, leaf in self.environments.reset().items()}
        self._state = self.engine.network.initial_state(self.env.count)
        self._returns = np.zeros(self.env.count, np.float32)
        self._lengths = np.zeros(self.env.count, np.int64)

    def _give_environments_up(self) -> None:
        broken, self.environments = self.environments, None
        try:
            if broken is not None:
                broken.close()
        except Exception:  # they are given up because they are broken: closing them may fail as well
            pass

    async def close(self) -> None:
        await super().close()
        self._give_environments_up()


class Recording:
    """Arrays of one trajectory while it grows, with views for torch; layouts as in `Trajectory`."""

    def __init__(self, spaces: Spaces, steps: int, count: int, outputs: int) -> None:
        self.observations: dict[str, Array] = {
            leaf.name: np.empty((steps + 1, count, *leaf.shape), leaf.dtype) for leaf in spaces.leaves
        }
        self._views = {name: torch.from_numpy(leaf) for name, leaf in self.observations.items()}
        box = spaces.action.kind == "box"
        shape = (steps, count, len(spaces.action.low)) if box else (steps, count, *spaces.action.shape)
        self.actions = np.empty(shape, np.float32 if box else np.int64)
        self.action_tensor = torch.from_numpy(self.actions)
        self.outputs = torch.empty(steps, count, outputs)
        self.rewards = np.empty((steps, count), np.float32)
        self.terminated, self.truncated, self.valid = (np.empty((steps, count), bool) for _ in range(3))
        self.versions = np.empty((steps, count), np.int32)
        self.returns: list[Array] = []
        self.lengths: list[Array] = []
        self.initial_state: dict[str, Array] = {}
        self.passes: Passes = []  # if they are shared
        self._ended: list[tuple[int, Array, dict[str, Array]]] = []

    def show(self, t: int, observations: dict[str, Array]) -> None:
        for name, leaf in observations.items():
            self.observations[name][t] = leaf

    def shown(self, t: int) -> dict[str, torch.Tensor]:
        return {name: view[t] for name, view in self._views.items()}

    def last(self) -> dict[str, Array]:
        return {name: leaf[-1] for name, leaf in self.observations.items()}

    def act(self, t: int, actions: torch.Tensor, outputs: torch.Tensor, version: int) -> None:
        self.action_tensor[t] = actions
        self.outputs[t] = outputs
        self.versions[t] = version

    def step(self, t: int, result: Any) -> None:
        self.show(t + 1, result.observations)
        self.rewards[t] = result.rewards
        self.terminated[t], self.truncated[t], self.valid[t] = result.terminated, result.truncated, result.valid
        if result.ended.size:
            self._ended.append((t, result.ended, result.final_observations))

    def ended(self) -> Array:
        if not self._ended:
            return np.zeros((0, 2), np.int64)
        return np.concatenate([np.stack([np.full(len(n), t), n], 1) for t, n, _ in self._ended])

    def final_observations(self) -> dict[str, Array]:
        if not self._ended:
            return {}
        return {name: np.concatenate([leaves[name] for _, _, leaves in self._ended]) for name in self.observations}


# ----------------------------------------------------------------------------------------------------- the rollout


class TrajectoryEngine(Protocol):
    """Where trajectories come from: a dispatcher over actors, or one actor."""

    async def generate(self, request: TrajectoryRequest) -> Trajectory: ...


class ControlRollout:
    """A rollout function for control: ``await rollout(lease) -> Trajectory``, tried again elsewhere when an actor fails."""

    def __init__(self, engine: TrajectoryEngine, *, retries: int, incarnation: int = 0) -> None:
        self.engine, self.retry_limit, self.incarnation = engine, retries, incarnation
        self.scoring = 0
        self.retries = 0

    async def __call__(self, lease: Lease) -> Trajectory:
        """Raises `RolloutDropped` ("retries") when every try failed."""
        for attempt in range(self.retry_limit + 1):
            key = RequestKey(lease_id=lease.lease_id, attempt=attempt, incarnation=self.incarnation)
            try:
                return await self.engine.generate(TrajectoryRequest(key=key))
            except PartFailed as error:
                self.retries += 1
                problem = str(error).partition("\n")[0]
        raise RolloutDropped("retries", problem)
