"""Turns gymnax environments, which JAX compiles, into a simulator: JAX's arrays and torch's tensors share memory by dlpack.

Run on a CPU only so far: untested on a GPU, where both libraries must be built for the same one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, MissingExtra
from headrace.rollout.environments.simulators.base import Actions, TensorStep, scramble


class GymnaxEnvironments:
    """`count` gymnax environments behind the methods of a `Simulator`, all steps of them in one compiled call.

    What an environment draws follows from its own seed and the number of steps so far, never from its neighbours.
    """

    def __init__(
        self,
        name: str,
        count: int,
        *,
        seeds: int | Tensor = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        time_limit: int | None = None,
    ) -> None:
        try:
            import gymnax
            import jax
        except ImportError:
            raise MissingExtra("gymnax", "gymnax", f"env.id = sim:gymnax/{name}") from None
        try:
            environment, params = gymnax.make(name)
        except ValueError as problem:
            raise ConfigError("env.id", f"sim:gymnax/{name} cannot be made: {problem}") from None
        if time_limit is not None:
            params = params.replace(max_steps_in_episode=time_limit)
        self.name, self.count, self.dtype, self.device = f"gymnax/{name}", count, dtype, torch.device(device)
        self.time_limit = int(params.max_steps_in_episode)
        self.actions = _actions(name, environment.action_space(params))
        shown = environment.observation_space(params).shape
        self.observation_size = 1
        for size in shown:
            self.observation_size *= int(size)
        self.observation_bound: tuple[float, ...] = ()
        self._jax = jax
        self._keys = jax.jit(lambda seeds: jax.vmap(jax.random.key)(seeds))
        self._reset = jax.jit(lambda keys: jax.vmap(environment.reset, in_axes=(0, None))(keys, params))

        def step(keys: Any, number: Any, state: Any, actions: Any) -> Any:
            own = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
            shown, state, rewards, terminated, truncated, info = jax.vmap(environment.step, in_axes=(0, 0, 0, None))(
                own, state, actions, params
            )
            parts = (shown, rewards, terminated, truncated & ~terminated, info["final_observation"])
            return state, tuple(part.reshape(count, -1) if part.ndim > 1 else part for part in parts)

        self._step = jax.jit(step)
        self.episodes = torch.zeros(count, dtype=torch.int64)
        self.seed(seeds)

    def seed(self, seeds: int | Tensor) -> None:
        if isinstance(seeds, int):
            own = torch.arange(self.count)
            seeds = scramble(torch.full_like(own, seeds), own)
        self._seeded = self._keys(self._to_jax((seeds & 0x7FFFFFFF).to(torch.int32)))
        self._steps = 0

    def reset(self) -> Tensor:
        """[N, D]"""
        self._steps += 1
        keys = self._jax.vmap(self._jax.random.fold_in, in_axes=(0, None))(self._seeded, self._steps)
        shown, self._state = self._reset(keys)
        return self._to_torch(shown.reshape(self.count, -1))

    def step(self, actions: Tensor) -> TensorStep:
        self._steps += 1
        taken = actions.to(torch.int32 if self.actions.choices else torch.float32)
        self._state, parts = self._step(self._seeded, self._steps, self._state, self._to_jax(taken))
        shown, rewards, terminated, truncated, final = (self._to_torch(part) for part in parts)
        return TensorStep(shown, rewards, terminated, truncated, final)

    def close(self) -> None: ...

    def _to_jax(self, tensor: Tensor) -> Any:
        return self._jax.dlpack.from_dlpack(tensor.contiguous())

    def _to_torch(self, array: Any) -> Tensor:
        """Shares the array's memory, which JAX never writes to again; numbers come in this simulator's type."""
        found = torch.from_dlpack(array)
        return found if found.dtype == torch.bool else found.to(self.dtype)


def _actions(name: str, space: Any) -> Actions:
    if hasattr(space, "n"):
        return Actions(choices=int(space.n))
    if len(space.shape) != 1:
        raise ConfigError(
            "env.id", f"sim:gymnax/{name} takes {space.shape} actions; only numbers and vectors can be given"
        )
    low, high = (torch.broadcast_to(torch.tensor(float(bound)), space.shape) for bound in (space.low, space.high))
    return Actions(low=tuple(low.tolist()), high=tuple(high.tolist()))
