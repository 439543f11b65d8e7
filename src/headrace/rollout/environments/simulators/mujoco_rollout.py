"""Turns MuJoCo's threaded `rollout` into batched half-cheetah and ant, with Gymnasium's observation, reward and termination.

`rollout` returns positions, velocities and sensors only. What needs contact forces (humanoid, ant-v5) goes by `stepping`.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, MissingExtra
from headrace.rollout.environments.simulators.base import Actions, Simulator

RESET_NOISE = 0.1
SMALLEST = 2.0**-54


class MujocoSimulator(Simulator):
    """A MuJoCo model of which every step takes `frame_skip` physics steps with the same control.

    `path` [N, frame_skip, 1 + nq + nv] holds time, positions and velocities after each physics step; numpy arrays and
    tensors are two views of the same memory. Each step's solver starts from the acceleration of the one before.
    """

    model_file = ""
    frame_skip = 5

    def __init__(self, count: int, *, threads: int = 0, physics: str = "rollout", **options: Any) -> None:
        try:
            import mujoco
            import mujoco.rollout
        except ImportError:
            raise MissingExtra("mujoco", "mujoco", f"env.id = sim:{self.name}") from None
        super().__init__(count, **options)
        if self.device.type != "cpu":
            problem = f'found "{self.device}", but {self.name} is stepped by the CPU; set it to cpu'
            raise ConfigError("env.device", problem)
        model = mujoco.MjModel.from_xml_path(str(_assets() / self.model_file))
        self.model, self.nq, self.nv = model, model.nq, model.nv
        self.seconds = model.opt.timestep * self.frame_skip
        threads = threads or len(os.sched_getaffinity(0))
        self._models = [model] * count
        self._data = [mujoco.MjData(model) for _ in range(threads)]
        self._spec = mujoco.mjtState.mjSTATE_CTRL.value
        self._pool = mujoco.rollout.Rollout(nthread=threads)
        self._chunk = -(-count // threads)  # MuJoCo's own choice is ten to a thread, each of which costs microseconds
        double = {"dtype": torch.float64}
        width = 1 + self.nq + self.nv
        self.first = torch.cat([torch.zeros(1, **double), torch.from_numpy(self._data[0].qpos), torch.zeros(self.nv)])
        self.now = self.first.repeat(count, 1)
        self.path = torch.zeros(count, self.frame_skip, width, **double)
        self.controls = torch.zeros(count, self.frame_skip, model.nu, **double)
        self.warm_start = torch.zeros(count, self.nv, **double)
        self._sensors = torch.zeros(count, self.frame_skip, model.nsensordata, **double)
        self._arrays = [part.numpy() for part in (self.now, self.warm_start, self.controls, self.path, self._sensors)]
        self.draws = self.nq + self.nv
        self._batched = _batched_physics(physics, model, count, self.frame_skip)

    @property
    def positions(self) -> Tensor:
        """[N, nq]"""
        return self.now[:, 1 : 1 + self.nq]

    @property
    def velocities(self) -> Tensor:
        """[N, nv]"""
        return self.now[:, 1 + self.nq :]

    def move(self, actions: Tensor) -> Tensor:
        """`frame_skip` physics steps; [N] the mean speed along the first position."""
        before = self.now[:, 1].clone()
        if self._batched is None:
            self._roll_out(actions)
        else:
            positions, velocities = self._batched.move(self.positions, self.velocities, actions)
            self.positions.copy_(positions)
            self.velocities.copy_(velocities)
        return (self.now[:, 1] - before) / self.seconds

    def _roll_out(self, actions: Tensor) -> None:
        self.controls.copy_(actions[:, None])
        now, warm_start, controls, path, sensors = self._arrays
        self._pool.rollout(
            self._models, self._data, now, controls, skip_checks=True, nstep=self.frame_skip,
            initial_warmstart=warm_start, state=path, sensordata=sensors, control_spec=self._spec, chunk_size=self._chunk,
        )  # fmt: skip
        last, before = self.path[:, -1, 1 + self.nq :], self.path[:, -2, 1 + self.nq :]
        torch.sub(last, before, out=self.warm_start).div_(self.model.opt.timestep)
        self.now.copy_(self.path[:, -1])

    def start(self, where: Tensor, uniforms: Tensor) -> None:
        """Positions off the model's own by up to 0.1 either way, velocities by a normal of deviation 0.1."""
        shift = RESET_NOISE * (2 * uniforms[:, : self.nq] - 1)
        normal = math.sqrt(2) * torch.special.erfinv(2 * uniforms[:, self.nq :].clamp(min=SMALLEST) - 1)
        fresh = self.first.repeat(self.count, 1)
        fresh[:, 1 : 1 + self.nq] += shift
        fresh[:, 1 + self.nq :] += RESET_NOISE * normal
        torch.where(where[:, None], fresh, self.now, out=self.now)
        self.warm_start.masked_fill_(where[:, None], 0.0)

    def close(self) -> None:
        self._pool.close()


class HalfCheetah(MujocoSimulator):
    """HalfCheetah-v4 (and v5, which differs in its info alone): speed forwards minus 0.1 of the squared action."""

    name = "HalfCheetah-v4"
    model_file = "half_cheetah.xml"
    actions = Actions(low=(-1.0,) * 6, high=(1.0,) * 6)
    observation_size = 17
    default_time_limit = 1000

    def observe(self) -> Tensor:
        return self.now[:, 2:].to(self.dtype, copy=True)

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        rewards = self.move(actions) - 0.1 * actions.double().square().sum(1)
        return rewards.to(self.dtype), torch.zeros(self.count, dtype=torch.bool)


class Ant(MujocoSimulator):
    """Ant-v4 without contact forces: speed forwards plus 1 minus half the squared action, while the torso is at 0.2 to 1.0.

    Gymnasium takes the torso's place for the speed from `xpos`, which the integrator leaves as it was in the last of its four
    stages; here it is the place that the step ends in. Both add up to the same distance over an episode; a single reward
    differs by 0.003 on average over random actions, by up to 0.05 where a foot hits the ground.
    """

    name = "Ant-v4"
    model_file = "ant.xml"
    actions = Actions(low=(-1.0,) * 8, high=(1.0,) * 8)
    observation_size = 27
    default_time_limit = 1000

    def observe(self) -> Tensor:
        return self.now[:, 3:].to(self.dtype, copy=True)

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        rewards = self.move(actions) + 1.0 - 0.5 * actions.double().square().sum(1)
        height = self.positions[:, 2]
        healthy = (height >= 0.2) & (height <= 1.0) & self.now[:, 1:].isfinite().all(1)
        return rewards.to(self.dtype), ~healthy


MUJOCO: dict[str, type[MujocoSimulator]] = {kind.name: kind for kind in (HalfCheetah, Ant)}


def _batched_physics(kind: str, model: Any, count: int, frame_skip: int) -> Any:
    """None for MuJoCo's own threads."""
    match kind:
        case "rollout":
            return None
        case "mjx":
            from headrace.rollout.environments.simulators.mujoco_batched import MjxPhysics

            return MjxPhysics(model, count, frame_skip)
        case "warp":
            from headrace.rollout.environments.simulators.mujoco_batched import WarpPhysics

            return WarpPhysics(model, count, frame_skip)
    raise ConfigError("env.options.physics", f"found {kind!r}; use rollout, mjx or warp")


def _assets() -> Path:
    """Gymnasium's models, found without importing its renderer."""
    spec = importlib.util.find_spec("gymnasium")
    if spec is None or spec.origin is None:
        raise MissingExtra("gymnasium", "mujoco", "a MuJoCo simulator")
    return Path(spec.origin).parent / "envs" / "mujoco" / "assets"
