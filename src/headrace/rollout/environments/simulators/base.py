"""Turns actions of many environments into their next observations, all as tensors of one device: the base of the simulators.

Every simulator resets an environment in the step that ends it, from seeds of its own: what an environment starts from
depends on its seed and on how many episodes it had, never on its neighbours. No step asks a device for a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Actions:
    """What a simulator takes: whole numbers below `choices` ([N]), or [N, k] real numbers between low and high."""

    choices: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.choices else (len(self.low),)


class TensorStep(NamedTuple):
    """One step of N environments.

    observations: [N, D] to act on next: that of a new episode where one ended
    rewards: [N]; terminated, truncated: [N] bool, never both
    final_observations: [N, D] what the step itself led to; the true last observation where an episode ended
    """

    observations: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observations: Tensor


class Simulator:
    """`count` environments side by side. A subclass says how they move, what they show and how they start.

    seeds: [N] of the environments, or one number that theirs are made from; time_limit: steps to a truncation, 0: none
    """

    name = ""
    actions = Actions()
    observation_size = 0
    observation_bound: tuple[float, ...] = ()
    """Largest size of each number of an observation; empty: none is known."""
    draws = 0
    """Random numbers that an episode starts from."""
    default_time_limit = 0

    def __init__(
        self,
        count: int,
        *,
        seeds: int | Tensor = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        time_limit: int | None = None,
    ) -> None:
        if count < 1:
            raise ConfigError("env.count", f"must be 1 or more, found {count}")
        self.count, self.device, self.dtype = count, torch.device(device), dtype
        self.time_limit = self.default_time_limit if time_limit is None else time_limit
        self.elapsed = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.episodes = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.seed(seeds)

    # ------------------------------------------------------------------------------------------------ a subclass's

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Move by one step: [N] rewards and [N] terminated."""
        raise NotImplementedError

    def observe(self) -> Tensor:
        """[N, D] a new tensor."""
        raise NotImplementedError

    def start(self, where: Tensor, uniforms: Tensor) -> None:
        """Put the environments where [N] is True at the start of an episode; uniforms: [N, draws] from 0 to below 1."""
        raise NotImplementedError

    def close(self) -> None: ...

    # ------------------------------------------------------------------------------------------------------- the rest

    def seed(self, seeds: int | Tensor) -> None:
        """From the next reset on, episodes are those that follow from these seeds."""
        self.episodes.zero_()
        if isinstance(seeds, int):
            own = torch.arange(self.count, dtype=torch.int64, device=self.device)
            seeds = scramble(torch.full_like(own, seeds), own)
        self.seeds = seeds.to(self.device)

    def reset(self) -> Tensor:
        """[N, D] first observations of new episodes everywhere."""
        self._begin(torch.ones(self.count, dtype=torch.bool, device=self.device))
        return self.observe()

    def step(self, actions: Tensor) -> TensorStep:
        rewards, terminated = self.advance(actions)
        self.elapsed += 1
        truncated = (self.elapsed >= self.time_limit) & ~terminated if self.time_limit else torch.zeros_like(terminated)
        final = self.observe()
        done = terminated | truncated
        # Only where asking costs no wait for the device: elsewhere every step does the work of a reset.
        if self.device.type == "cpu" and not done.any():
            return TensorStep(final, rewards, terminated, truncated, final)
        self._begin(done)
        return TensorStep(self.observe(), rewards, terminated, truncated, final)

    def _begin(self, where: Tensor) -> None:
        self.start(where, self._uniforms(where))
        self.episodes += where
        self.elapsed.masked_fill_(where, 0)

    def _uniforms(self, where: Tensor) -> Tensor:
        """[N, draws] what the next episodes start from; on a CPU only the rows that are asked for, the others are 0."""
        numbers = torch.arange(self.draws, dtype=torch.int64, device=self.device)
        if self.device.type != "cpu":
            return _uniform(scramble(scramble(self.seeds, self.episodes)[:, None], numbers))
        rows = where.nonzero()[:, 0]
        uniforms = torch.zeros(self.count, self.draws, dtype=torch.float64)
        uniforms[rows] = _uniform(scramble(scramble(self.seeds[rows], self.episodes[rows])[:, None], numbers))
        return uniforms


def _uniform(bits: Tensor) -> Tensor:
    """float64 from 0 to below 1, of the upper 53 bits."""
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def scramble(seeds: Tensor, numbers: Tensor) -> Tensor:
    """int64 seeds and numbers (broadcast) into int64 bits without a pattern: the splitmix64 generator at its `number`-th
    step. Steele et al. 2014, "Fast splittable pseudorandom number generators"; products wrap at 64 bits."""
    bits = seeds + (numbers + 1) * -0x61C8864680B583EB
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)
