"""Turns a simulator into a Gymnasium vector environment of numpy arrays, so that whatever drives those can drive it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space

from headrace.rollout.environments.simulators.base import Simulator
from headrace.types import Array


class SimulatorVectorEnv(gymnasium.vector.VectorEnv):
    """Resets in the step that ends an episode; the info then holds the true last observations, `final_obs` [N, D].

    `reset(seed=...)` takes one seed or one for each environment. Arrays are views of the simulator's tensors on a CPU, copies
    from elsewhere; what a step gave stays as it was.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.num_envs = simulator, simulator.count
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = spaces_of(simulator)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | list[int] | None = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        if seed is not None:
            self.simulator.seed(seed if isinstance(seed, int) else torch.tensor(seed))
        return self.simulator.reset().numpy(force=True), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        taken = torch.from_numpy(np.ascontiguousarray(actions)).to(self.simulator.device)
        observations, *rest, final = (part.numpy(force=True) for part in self.simulator.step(taken))
        rewards, terminated, truncated = rest
        info: dict[str, Any] = {}
        done = terminated | truncated
        if done.any():
            info = {"final_obs": final, "_final_obs": done}
        return observations, rewards, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        self.simulator.close()


def spaces_of(simulator: Simulator) -> tuple[gymnasium.Space, gymnasium.Space]:
    """The single observation and action space."""
    kind = np.float64 if simulator.dtype == torch.float64 else np.float32
    bound = np.array(simulator.observation_bound or [np.inf] * simulator.observation_size, dtype=kind)
    observation = gymnasium.spaces.Box(-bound, bound, dtype=kind)
    actions = simulator.actions
    if actions.choices:
        return observation, gymnasium.spaces.Discrete(actions.choices)
    low, high = np.array(actions.low, dtype=np.float32), np.array(actions.high, dtype=np.float32)
    return observation, gymnasium.spaces.Box(low, high, dtype=np.float32)
