"""Turns steps of a simulator into trajectories of tensors that stay on its device: the actor of the Isaac style.

What reaches the host, once a trajectory: whether all was finite, how many episodes ended, and their returns and lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import PartFailed
from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import PLAIN, Spaces, describe_spaces
from headrace.protocols import TrajectoryRequest, WeightChannel, WorkerContext
from headrace.rollout.acting import mix_seed
from headrace.rollout.config import EnvConfig
from headrace.rollout.control_rollout import Actor
from headrace.rollout.engines.policy_network import PolicyNetworkEngine
from headrace.rollout.environments.making import simulator_options
from headrace.rollout.environments.simulators import make_simulator
from headrace.types import Trajectory


def build_tensor_actor(
    context: WorkerContext, env: EnvConfig, policy: PolicyConfig, channel: WeightChannel | None, seed: int
) -> TensorActor:
    """A simulator and a policy copy on one device. The name's last part is the actor's number."""
    if context.resources.threads:
        torch.set_num_threads(context.resources.threads)
    return TensorActor(context, env, policy, channel, seed)


class SimulatedEnvironments:
    """A simulator with the description of what it shows and takes."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        from headrace.rollout.environments.simulators.vector_env import spaces_of

        name = config.id.partition(":")[2]
        self.simulator = make_simulator(name, config.count, seeds=seed, **simulator_options(config))
        self.spaces: Spaces = describe_spaces(*spaces_of(self.simulator))
        self.count = self.simulator.count

    def close(self) -> None:
        self.simulator.close()


class TensorActor(Actor):
    """An `Actor` whose environments and recordings are tensors. The policy has no memory."""

    def _make(self) -> Any:
        self.makes += 1
        return SimulatedEnvironments(self.env, mix_seed(mix_seed(self.seed, self.index), self.makes))

    def _make_engine(self, policy: PolicyConfig, channel: WeightChannel | None) -> PolicyNetworkEngine:
        spaces = self.environments.spaces  # type: ignore[union-attr]
        return PolicyNetworkEngine(spaces, policy, channel, mix_seed(self.seed, self.index), self.env.device)

    def _begin_episodes(self) -> None:
        self._shown: Tensor = self.environments.simulator.reset()  # type: ignore[union-attr]
        self._open_returns = torch.zeros(self.env.count, device=self._shown.device)
        self._open_lengths = torch.zeros(self.env.count, dtype=torch.int64, device=self._shown.device)

    @torch.no_grad()
    async def _record_trajectory(self, request: TrajectoryRequest) -> Trajectory:
        steps, count, engine = self.env.steps, self.env.count, self.engine
        simulator, shown = self.environments.simulator, self._shown  # type: ignore[union-attr]
        act, step, to_simulator = engine.step, simulator.step, engine.distribution.to_simulator
        observations = shown.new_empty(steps + 1, *shown.shape)
        observations[0] = shown
        noise = engine.noise(steps, count)
        actions, outputs, versions, results = [], [], np.empty(steps, np.int32), []
        for t in range(steps):
            taken, found, _ = act({PLAIN: observations[t]}, {}, noise[t])
            result = step(to_simulator(taken))
            observations[t + 1] = result.observations
            actions.append(taken)
            outputs.append(found)
            results.append(result)
            versions[t] = engine.version
            await self._give_way(request.request_id, t)
        self._steps += steps * count
        self._shown = observations[steps].clone()
        return self._trajectory_of(request, observations, torch.stack(actions), torch.stack(outputs), versions, results)

    def _trajectory_of(
        self,
        request: TrajectoryRequest,
        observations: Tensor,
        actions: Tensor,
        outputs: Tensor,
        versions: np.ndarray,
        results: list[Any],
    ) -> Trajectory:
        rewards, terminated, truncated = (
            torch.stack([getattr(result, name) for result in results])
            for name in ("rewards", "terminated", "truncated")
        )
        shape = tuple(rewards.shape)
        if not (observations.isfinite().all() & rewards.isfinite().all()):
            raise PartFailed(f"{self.env.id} gave observations or rewards that are not finite")
        returns, lengths = self._episodes(rewards, terminated | truncated)
        clip = self.env.reward_clip
        ended = truncated.nonzero()
        final = {}
        if len(ended):
            t, n = ended.T
            final = {PLAIN: torch.stack([result.final_observations for result in results])[t, n]}
        return Trajectory(
            sample_id=request.key.lease_id,
            observations={PLAIN: observations},  # type: ignore[dict-item]
            actions=actions,  # type: ignore[arg-type]
            rewards=rewards.clamp(-clip, clip) if clip else rewards,  # type: ignore[arg-type]
            terminated=terminated,  # type: ignore[arg-type]
            truncated=truncated,  # type: ignore[arg-type]
            valid=np.ones(shape, bool),
            behavior_logprobs=self.engine.distribution.logprobs(outputs, actions),  # type: ignore[arg-type]
            policy_versions=np.broadcast_to(versions[:, None], shape),
            ended=ended,  # type: ignore[arg-type]
            final_observations=final,
            episode_returns=returns.numpy(force=True),
            episode_lengths=lengths.numpy(force=True),
        )

    def _episodes(self, rewards: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        """Returns and lengths [E] of the episodes that ended, environment by environment; what is open is carried over."""
        steps, count = rewards.shape
        total = rewards.cumsum(0) + self._open_returns
        n, t = done.T.nonzero().T
        ends = total[t, n]
        first = torch.ones_like(n, dtype=torch.bool)
        first[1:] = n[1:] != n[:-1]
        ends_before, t_before = ends.roll(1), t.roll(1)
        returns = torch.where(first, ends, ends - ends_before)
        lengths = torch.where(first, self._open_lengths[n] + t + 1, t - t_before)
        last_end = torch.full((count,), -1, device=t.device).scatter_reduce_(0, n, t, "amax")
        ended = last_end >= 0
        closed = total.gather(0, last_end.clamp(min=0)[None])[0]
        self._open_returns = torch.where(ended, total[-1] - closed, total[-1])
        self._open_lengths = torch.where(ended, steps - 1 - last_end, self._open_lengths + steps)
        return returns, lengths
