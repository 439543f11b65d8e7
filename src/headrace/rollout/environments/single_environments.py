"""Turns single Gymnasium environments into a vector of them that resets in the same step: one loop in this process.

What Gymnasium's `SyncVectorEnv` does with `SAME_STEP`, without what costs more than many an environment's own step: infos are
not collected, and the wrappers of `gymnasium.make` that only check or count are taken off, their time limit kept here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.types import Array


class SingleEnvironments:
    """A `VectorEnv` in the few methods that are used here. make: one function for each environment."""

    def __init__(self, make: Sequence[Callable[[], Any]]) -> None:
        from gymnasium import spaces
        from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

        self.envs = [one() for one in make]
        self.num_envs = len(self.envs)
        self.metadata = {"autoreset_mode": "SameStep"}
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        action_space = batch_space(self.single_action_space, self.num_envs)
        self._actions = lambda actions: iterate(action_space, actions)
        bare, limits = zip(*(_without_counting(env) for env in self.envs), strict=True)
        self._steps, self._resets = [env.step for env in bare], [env.reset for env in bare]
        self._limits = np.array(limits)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._shown: list[Any] = [None] * self.num_envs
        self._batch = create_empty_array(self.single_observation_space, self.num_envs, fn=np.zeros)
        if isinstance(self.single_observation_space, spaces.Box) and self.single_observation_space.shape:
            # One copy for all of them; as with `numpy.stack` a wrong shape raises, and numbers are cast within their kind.
            flat = self._batch.reshape(-1, *self._batch.shape[2:])
            self._show = lambda: np.concatenate(self._shown, out=flat)
        else:
            self._show = lambda: concatenate(self.single_observation_space, self._shown, self._batch)

    def reset(self, *, seed: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """New episodes everywhere, one seed an environment."""
        self._shown = [reset(seed=own)[0] for reset, own in zip(self._resets, seed, strict=True)]
        self._lengths[:] = 0
        return self._observations(), {}

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Observations lie in memory that the next step writes to."""
        results = [step(action) for step, action in zip(self._steps, self._actions(actions), strict=True)]
        shown, rewards, terminated, truncated, _ = zip(*results, strict=True)
        self._shown = list(shown)
        self._lengths += 1
        ended = np.array(terminated, bool)
        out_of_time = np.array(truncated, bool) | (self._lengths >= self._limits)
        over = np.flatnonzero(ended | out_of_time)
        info = {"final_obs": self._begin_again(over)} if over.size else {}
        return self._observations(), np.array(rewards, np.float32), ended, out_of_time, info

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _begin_again(self, over: Array) -> Array:
        """[N] objects, the last observation of each that is over: a copy, since an environment may reuse its memory."""
        final = np.empty(self.num_envs, object)
        for n in over:
            shown = self._shown[n]  # an array's own copy takes a tenth of the time
            plain = isinstance(shown, np.ndarray) and not shown.dtype.hasobject
            final[n] = shown.copy() if plain else copy.deepcopy(shown)
            self._shown[n] = self._resets[n]()[0]
        self._lengths[over] = 0
        return final

    def _observations(self) -> Any:
        self._show()
        return self._batch


def _without_counting(env: Any) -> tuple[Any, float]:
    """The environment below those outer wrappers that do nothing but check calls and count steps, and its time limit.

    Only these very classes are taken off: a subclass may do more.
    """
    from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

    limit = np.inf
    while type(env) in (OrderEnforcing, PassiveEnvChecker, TimeLimit):
        if type(env) is TimeLimit:
            limit = min(limit, env._max_episode_steps)
        env = env.env
    return env, limit
