"""Environments simulated many at once, as tensors: one file per physics, opened by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.rollout.environments.simulators.base import Simulator


def make_simulator(name: str, count: int, **options: Any) -> Simulator:
    """`count` environments of the simulator called `name`; options are those of `Simulator`. Raises `ConfigError`."""
    from headrace.rollout.environments.simulators.classic import CLASSIC

    if name in CLASSIC:
        return CLASSIC[name](count, **options)
    raise ConfigError("env.id", f"no simulator is called {name!r}; choose one of {', '.join(CLASSIC)}")


def make_vector(num_envs: int, name: str, **options: Any) -> Any:
    """The simulator as a Gymnasium vector environment."""
    from headrace.rollout.environments.simulators.vector_env import SimulatorVectorEnv

    return SimulatorVectorEnv(make_simulator(name, num_envs, **options))
