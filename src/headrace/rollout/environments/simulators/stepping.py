"""Turns any single Gymnasium environment into a simulator, by stepping copies of it in threads.

For MuJoCo tasks whose observation needs what `mujoco.rollout` does not return (contact forces: Humanoid, Ant-v5, and the
rest). MuJoCo lets go of the interpreter's lock inside its physics, so threads overlap there and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, MissingExtra
from headrace.rollout.environments.simulators.base import Actions, TensorStep, scramble


class SteppedEnvironments:
    """`count` environments behind the methods of a `Simulator`, with vector observations, on the CPU. Environment n starts
    its episodes from its own random generator, seeded once."""

    def __init__(
        self,
        name: str,
        count: int,
        *,
        seeds: int | Tensor = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        time_limit: int | None = None,
        threads: int = 0,
    ) -> None:
        try:
            import gymnasium
        except ImportError:
            raise MissingExtra("gymnasium", "mujoco", f"env.id = sim:{name}") from None
        if device != "cpu":
            raise ConfigError("env.device", f'found "{device}", but {name} is stepped by the CPU; set it to cpu')
        spec = gymnasium.spec(name)
        # The time limit and the checks of Gymnasium's wrappers are done here, for all environments at once.
        self.environments = [gymnasium.make(name, disable_env_checker=True).unwrapped for _ in range(count)]
        self.name, self.count, self.dtype, self.device = name, count, dtype, torch.device("cpu")
        self.time_limit = (spec.max_episode_steps or 0) if time_limit is None else time_limit
        shown, taken = self.environments[0].observation_space, self.environments[0].action_space
        if len(shown.shape or ()) != 1:
            raise ConfigError("env.id", f"{name} shows {shown}, only vectors can be stepped so; use it without sim:")
        self.observation_size = int(shown.shape[0])
        self.observation_bound: tuple[float, ...] = ()
        if isinstance(taken, gymnasium.spaces.Discrete):
            self.actions = Actions(choices=int(taken.n))
        else:
            self.actions = Actions(low=tuple(taken.low.tolist()), high=tuple(taken.high.tolist()))
        threads = threads or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="step")
        self._shares = [range(first, count, threads) for first in range(min(threads, count))]
        self.elapsed, self.episodes = np.zeros((2, count), dtype=np.int64)
        self.seed(seeds)

    def seed(self, seeds: int | Tensor) -> None:
        if isinstance(seeds, int):
            own = torch.arange(self.count)
            seeds = scramble(torch.full_like(own, seeds), own)
        self._seeds: list[int | None] = [int(seed) & 0x7FFFFFFF for seed in seeds]

    def reset(self) -> Tensor:
        """[N, D]"""
        first = np.empty((self.count, self.observation_size))
        for _ in self._pool.map(lambda share: [self._begin(n, first) for n in share], self._shares):
            pass
        return torch.from_numpy(first).to(self.dtype)

    def step(self, actions: Tensor) -> TensorStep:
        taken = actions.numpy()
        final = np.empty((self.count, self.observation_size))
        rewards = np.empty(self.count)
        terminated = np.empty(self.count, dtype=bool)

        def run(share: Sequence[int]) -> None:
            for n in share:
                final[n], rewards[n], terminated[n], _, _ = self.environments[n].step(taken[n])

        for _ in self._pool.map(run, self._shares):
            pass
        self.elapsed += 1
        truncated = (self.elapsed >= self.time_limit) & ~terminated if self.time_limit else np.zeros_like(terminated)
        shown = final
        if (done := terminated | truncated).any():
            shown = final.copy()
            for n in np.flatnonzero(done):
                self._begin(int(n), shown)
        as_tensors = [torch.from_numpy(part) for part in (shown, rewards, terminated, truncated, final)]
        return TensorStep(*(part.to(self.dtype) if part.dtype == torch.float64 else part for part in as_tensors))

    def _begin(self, n: int, into: np.ndarray) -> None:
        into[n], _ = self.environments[n].reset(seed=self._seeds[n])
        self._seeds[n] = None
        self.elapsed[n] = 0
        self.episodes[n] += 1

    def close(self) -> None:
        self._pool.shutdown()
        for environment in self.environments:
            environment.close()
