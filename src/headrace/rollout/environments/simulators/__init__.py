"""Environments simulated many at once, as tensors: one file per physics, opened by name.

CartPole-v1, Pendulum-v1, Acrobot-v1, MountainCar-v0, MountainCarContinuous-v0    classic: equations in torch
HalfCheetah-v4, Ant-v4                                                            mujoco_rollout: MuJoCo's threads
any other Gymnasium id with vector observations                                   stepping: copies in threads
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.rollout.environments.simulators.base import Simulator


def make_simulator(name: str, count: int, **options: Any) -> Simulator:
    """`count` environments of the simulator called `name`; options are those of its class. Raises `ConfigError`."""
    from headrace.rollout.environments.simulators.classic import CLASSIC
    from headrace.rollout.environments.simulators.mujoco_rollout import MUJOCO

    place, _, rest = name.partition("/")
    if place == "gymnax":
        from headrace.rollout.environments.simulators.gymnax_envs import GymnaxEnvironments

        return GymnaxEnvironments(rest, count, **options)  # type: ignore[return-value]
    known: dict[str, Any] = {**CLASSIC, **MUJOCO}
    if name in known:
        return known[name](count, **options)
    return _stepped(name, count, **options)


def _stepped(name: str, count: int, **options: Any) -> Any:
    from headrace.rollout.environments.simulators.stepping import SteppedEnvironments

    try:
        return SteppedEnvironments(name, count, **options)
    except Exception as problem:
        if type(problem).__module__.partition(".")[0] != "gymnasium":
            raise
        raise ConfigError("env.id", f"sim:{name} cannot be made: {' '.join(str(problem).split())}") from None


def make_vector(num_envs: int, name: str, **options: Any) -> Any:
    """The simulator as a Gymnasium vector environment."""
    from headrace.rollout.environments.simulators.vector_env import SimulatorVectorEnv

    return SimulatorVectorEnv(make_simulator(name, num_envs, **options))
