"""Turns Gymnasium's classic control systems into batches of tensors: the same dynamics, one row of the state a variable."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headrace.rollout.environments.simulators.base import Actions, Simulator


class ClassicSimulator(Simulator):
    """A system whose whole state is `variables` numbers. `state` is [variables, N], written in place."""

    variables = 0

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(count, **options)
        self.state = torch.zeros(self.variables, count, dtype=self.dtype, device=self.device)

    def initial(self, uniforms: Tensor) -> Tensor:
        """[variables, N] float64 from uniforms [draws, N]."""
        raise NotImplementedError

    def start(self, where: Tensor, uniforms: Tensor) -> None:
        torch.where(where, self.initial(uniforms.T).to(self.dtype), self.state, out=self.state)

    def observe(self) -> Tensor:
        return self.state.T.clone(memory_format=torch.contiguous_format)


class CartPole(ClassicSimulator):
    """CartPole-v1: keep a pole upright on a cart. Barto, Sutton and Anderson 1983; Euler steps of 0.02 s."""

    name = "CartPole-v1"
    actions = Actions(choices=2)
    observation_size = variables = draws = 4
    observation_bound = (4.8, math.inf, 24 * 2 * math.pi / 360, math.inf)
    default_time_limit = 500

    gravity, mass_pole, total_mass, half_length, force, seconds = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
    pole_moment = mass_pole * half_length
    largest_x, largest_angle = 2.4, 12 * 2 * math.pi / 360

    def initial(self, uniforms: Tensor) -> Tensor:
        return uniforms * 0.1 - 0.05

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(count, **options)
        self.rewards = torch.ones(count, dtype=self.dtype, device=self.device)

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        # Few and fused operations: for a thousand environments each costs about as much as the numbers it works on.
        _, x_dot, angle, angle_dot = self.state
        cos, sin = angle.cos(), angle.sin()
        push = actions.to(self.dtype).mul_(2 * self.force).sub_(self.force)
        push.add_(angle_dot.square().mul_(sin), alpha=self.pole_moment).div_(self.total_mass)
        share = self.mass_pole / self.total_mass
        inertia = cos.square().mul_(-self.half_length * share).add_(self.half_length * 4.0 / 3.0)
        angle_acc = torch.addcmul(sin.mul_(self.gravity), cos, push, value=-1.0).div_(inertia)
        x_acc = push.addcmul_(angle_acc, cos, value=-self.pole_moment / self.total_mass)
        places = self.state[0::2]
        places.add_(self.state[1::2], alpha=self.seconds)
        x_dot.add_(x_acc, alpha=self.seconds)
        angle_dot.add_(angle_acc, alpha=self.seconds)
        sizes = places.abs()
        return self.rewards, (sizes[0] > self.largest_x) | (sizes[1] > self.largest_angle)


class Pendulum(ClassicSimulator):
    """Pendulum-v1: swing up and hold, by a torque of at most 2; reward -(angle^2 + 0.1 speed^2 + 0.001 torque^2)."""

    name = "Pendulum-v1"
    actions = Actions(low=(-2.0,), high=(2.0,))
    observation_size = 3
    observation_bound = (1.0, 1.0, 8.0)
    variables = draws = 2
    default_time_limit = 200

    gravity, mass, length, seconds, largest_speed, largest_torque = 10.0, 1.0, 1.0, 0.05, 8.0, 2.0

    def initial(self, uniforms: Tensor) -> Tensor:
        centred = uniforms * 2 - 1
        return torch.stack([centred[0] * math.pi, centred[1]])

    def observe(self) -> Tensor:
        angle, speed = self.state
        return torch.stack([angle.cos(), angle.sin(), speed], 1)

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        angle, speed = self.state
        torque = actions[:, 0].to(self.dtype).clamp(-self.largest_torque, self.largest_torque)
        upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
        costs = upright.square() + 0.1 * speed.square() + 0.001 * torque.square()
        pull = 3 * self.gravity / (2 * self.length) * angle.sin() + 3.0 / (self.mass * self.length**2) * torque
        speed.add_(pull * self.seconds).clamp_(-self.largest_speed, self.largest_speed)
        angle.add_(speed * self.seconds)
        return -costs, torch.zeros_like(costs, dtype=torch.bool)


class Acrobot(ClassicSimulator):
    """Acrobot-v1: swing the tip of two links above a line. Sutton 1996, the book's equations, Runge-Kutta steps of 0.2 s.

    Links of length, mass and moment of inertia 1, their centres of mass at 0.5, gravity 9.8.
    """

    name = "Acrobot-v1"
    actions = Actions(choices=3)
    observation_size = 6
    observation_bound = (1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi)
    variables = draws = 4
    default_time_limit = 500

    seconds, gravity = 0.2, 9.8

    def initial(self, uniforms: Tensor) -> Tensor:
        return (uniforms * 0.2 - 0.1).to(torch.float32).to(torch.float64)  # Gymnasium rounds it so

    def observe(self) -> Tensor:
        first, second, first_dot, second_dot = self.state
        return torch.stack([first.cos(), first.sin(), second.cos(), second.sin(), first_dot, second_dot], 1)

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        torque, h, s = actions.to(self.dtype) - 1, self.seconds, self.state
        k1 = self._slope(s, torque)
        k2 = self._slope(s + h / 2 * k1, torque)
        k3 = self._slope(s + h / 2 * k2, torque)
        k4 = self._slope(s + h * k3, torque)
        s += h / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = s[:2]
        angles -= 2 * math.pi * (angles / (2 * math.pi)).round()
        s[2].clamp_(-4 * math.pi, 4 * math.pi)
        s[3].clamp_(-9 * math.pi, 9 * math.pi)
        terminated = -s[0].cos() - (s[1] + s[0]).cos() > 1.0
        return terminated.to(self.dtype) - 1, terminated

    def _slope(self, state: Tensor, torque: Tensor) -> Tensor:
        """[4, N] d state / dt."""
        first, second, first_dot, second_dot = state
        cos, sin = second.cos(), second.sin()
        d1 = 0.25 + (1.25 + cos) + 2.0
        d2 = 0.25 + 0.5 * cos + 1.0
        phi2 = 0.5 * self.gravity * (first + second - math.pi / 2).cos()
        turning = -0.5 * second_dot.square() * sin - second_dot * first_dot * sin
        phi1 = turning + 1.5 * self.gravity * (first - math.pi / 2).cos() + phi2
        second_acc = torque + d2 / d1 * phi1 - 0.5 * first_dot.square() * sin - phi2
        second_acc = second_acc / (1.25 - d2.square() / d1)
        return torch.stack([first_dot, second_dot, -(d2 * second_acc + phi1) / d1, second_acc])


class MountainCar(ClassicSimulator):
    """MountainCar-v0: an underpowered car leaves a valley; reward -1 a step. Moore 1990."""

    name = "MountainCar-v0"
    actions = Actions(choices=3)
    observation_size = variables = 2
    observation_bound = (1.2, 0.07)
    draws = 1
    default_time_limit = 200

    goal, power = 0.5, 0.001

    def initial(self, uniforms: Tensor) -> Tensor:
        position = uniforms[0] * 0.2 - 0.6
        return torch.stack([position, torch.zeros_like(position)])

    def _move(self, force: Tensor) -> Tensor:
        """[N] terminated."""
        position, velocity = self.state
        velocity.add_(force * self.power - 0.0025 * (3 * position).cos()).clamp_(-0.07, 0.07)
        position.add_(velocity).clamp_(-1.2, 0.6)
        velocity.masked_fill_((position <= -1.2) & (velocity < 0), 0.0)
        return (position >= self.goal) & (velocity >= 0)

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        terminated = self._move(actions.to(self.dtype) - 1)
        return torch.full_like(self.state[0], -1.0), terminated


class MountainCarContinuous(MountainCar):
    """MountainCarContinuous-v0: the same by a force from -1 to 1; reward 100 at the goal, minus 0.1 force^2."""

    name = "MountainCarContinuous-v0"
    actions = Actions(low=(-1.0,), high=(1.0,))
    default_time_limit = 999

    goal, power = 0.45, 0.0015

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        force = actions[:, 0].to(self.dtype)
        terminated = self._move(force.clamp(-1.0, 1.0))
        self.state.copy_(self.state.to(torch.float32))  # Gymnasium keeps the state in single precision
        return 100.0 * terminated - 0.1 * force.square(), terminated


CLASSIC: dict[str, type[ClassicSimulator]] = {
    kind.name: kind for kind in (CartPole, Pendulum, Acrobot, MountainCar, MountainCarContinuous)
}
