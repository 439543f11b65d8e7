"""Turns observations into actions: a copy of the policy that takes its weights from the weight channel, as text engines do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, PartFailed, StaleTicket
from headrace.policies.config import PolicyConfig
from headrace.policies.distributions import distribution_of
from headrace.policies.networks import State, build_network
from headrace.policies.spaces import Spaces
from headrace.protocols import Actions, PauseMode, RunningPolicy, WeightChannel
from headrace.types import NO_VERSION, Array, EngineStats, WeightTicket


class PolicyNetworkEngine:
    """An `ActionEngine`. `step` is its inner face, for a loop in the same process; `act` the one that travels.

    Weights change between two forward passes only: `commit` copies what `prepare` staged.
    """

    def __init__(
        self, spaces: Spaces, config: PolicyConfig, channel: WeightChannel | None, seed: int, device: str = "cpu"
    ) -> None:
        self.spaces, self.channel = spaces, channel
        self.distribution = distribution_of(spaces.action, config.squash)
        self.network = build_network(spaces, config, self.distribution.size, seed).requires_grad_(False).to(device)
        self.multiplications = sum(parameter.numel() for parameter in self.network.parameters())
        """Of a row, at least."""
        if any(leaf.kind == "image" for leaf in spaces.leaves):  # a convolution uses each of its weights many times
            self.multiplications *= 16
        self.generator = torch.Generator(device).manual_seed(seed)
        self.version, self.swaps = NO_VERSION, 0
        self._tensors = dict(self.network.state_dict())  # the live ones, not copies
        self._staged: tuple[WeightTicket, dict[str, Tensor]] | None = None

    # ---------------------------------------------------------------------------------------------------- acting

    def noise(self, steps: int, count: int) -> Tensor:
        """What `step` needs for so many steps of so many environments, drawn at once."""
        return self.distribution.noise((steps, count), self.generator)

    def step(self, observations: dict[str, Tensor], state: State, noise: Tensor) -> tuple[Tensor, Tensor, State]:
        """Actions [B, ...] as sampled, the policy head's outputs [B, P] that they came from, and the next state."""
        outputs, state = self.network.act(observations, state)
        return self.distribution.sample(outputs, noise), outputs, state

    async def act(self, observations: dict[str, Array]) -> Actions:
        """One batch [B, ...] without a memory."""
        if self.network.recurrent:
            raise ConfigError("policy.recurrent", "a memory needs a loop of its own: act() has no state")
        with torch.inference_mode():
            leaves = {name: torch.from_numpy(np.ascontiguousarray(leaf)) for name, leaf in observations.items()}
            count = len(next(iter(leaves.values())))
            sampled, outputs, _ = self.step(leaves, {}, self.noise(1, count)[0])
            logprobs = self.distribution.logprobs(outputs, sampled)
        return Actions(actions=sampled.numpy(), logprobs=logprobs.numpy(), version=self.version)

    # --------------------------------------------------------------------------------------------------- weights

    async def prepare(self, ticket: WeightTicket) -> None:
        if ticket.version <= self.version or (self._staged is not None and self._staged[0] == ticket):
            return
        if self.channel is None:
            raise ConfigError("weights.channel", "this engine was built without a channel: it cannot receive weights")
        found = self.channel.read(ticket)
        try:
            if set(found) != set(self._tensors):
                raise PartFailed(f"version {ticket.version} has other tensors than this policy: {sorted(found)}")
            self._staged = (ticket, {name: tensor.clone() for name, tensor in found.items()})
        finally:
            self.channel.release(ticket)

    async def commit(self, ticket: WeightTicket, running: RunningPolicy = "go_on") -> None:
        if ticket.version < self.version:
            raise StaleTicket(f"version {ticket.version} is below {self.version}, the live one")
        if ticket.version == self.version:
            return
        if self._staged is None or self._staged[0].version != ticket.version:
            await self.prepare(ticket)
        assert self._staged is not None
        for name, tensor in self._staged[1].items():
            self._tensors[name].copy_(tensor)
        self.version, self._staged = ticket.version, None
        self.swaps += 1

    async def pause(self, mode: PauseMode) -> None:
        """A policy holds nothing between two calls."""

    async def resume(self) -> None:
        """See `pause`."""

    async def sleep(self, level: int) -> None:
        """Its weights are too small to be worth giving up."""

    async def wake(self) -> None:
        """See `sleep`."""

    async def stats(self) -> EngineStats:
        staged = self._staged[0].version if self._staged is not None else NO_VERSION
        return EngineStats(version=self.version, staged_version=staged, swaps=self.swaps)
