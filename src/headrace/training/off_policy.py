"""Turns transitions drawn from a replay into better networks: one class an algorithm, each with its networks and optimisers."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.policies.config import PolicyConfig
from headrace.policies.distributions import distribution_of
from headrace.policies.networks import Leaves, build_network
from headrace.policies.q_networks import TwinQ
from headrace.policies.spaces import Spaces
from headrace.training.config import AlgorithmConfig, TrainingConfig
from headrace.training.optimizer import FlatAdamW, FlatParameters
from headrace.training.q_learning import (
    follow,
    q_loss,
    q_targets,
    soft_policy_loss,
    soft_q_targets,
    taken,
    temperature_loss,
    twin_q_loss,
)


class Draw(NamedTuple):
    """Transitions as tensors, with their n-step returns: see `types.Transitions` and `q_learning.n_step_returns`."""

    observations: Leaves
    actions: Tensor
    returns: Tensor
    discounts: Tensor
    next_observations: Leaves
    weights: Tensor


class OffPolicy(Protocol):
    """network: what actors run; modules: all that a checkpoint holds; optimizers: by name, for the same."""

    network: nn.Module
    modules: dict[str, nn.Module]
    optimizers: dict[str, FlatAdamW]

    def update(self, draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
        """One step of every optimiser: scalars by name, and [B] errors."""
        ...

    def explore(self, progress: float) -> None:
        """Set how actors explore, `progress` (0 to 1) of the run in."""
        ...


class Dqn:
    """Double DQN with n-step targets. Mnih et al. 2015; van Hasselt et al. 2016, arXiv:1509.06461."""

    def __init__(
        self, spaces: Spaces, policy: PolicyConfig, training: TrainingConfig, algorithm: AlgorithmConfig, seed: int
    ) -> None:
        if spaces.action.kind != "discrete" or spaces.action.shape:
            raise ConfigError(
                "algorithm.kind", 'found "dqn", but the actions are not one discrete number; use sac or ppo'
            )
        self.algorithm = algorithm
        self.network = build_network(spaces, policy, spaces.action.sizes[0], seed)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.modules = {"online": self.network, "target": self.target}
        self.optimizers = {"online": _optimizer(self.network, training)}
        self.updates = 0

    def update(self, draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
        algorithm = self.algorithm
        with torch.no_grad():
            online = self.network(draw.next_observations) if algorithm.double else None
            targets = q_targets(draw.returns, draw.discounts, self.target(draw.next_observations), online)
        q = taken(self.network(draw.observations), draw.actions)
        loss, errors = q_loss(q, targets, draw.weights, algorithm.huber)
        loss.backward()
        self.optimizers["online"].step()
        self.updates += 1
        if self.updates % algorithm.target_every == 0:
            follow(self.target.parameters(), self.network.parameters(), algorithm.target_rate)
        return {"loss/total": loss, "value/mean": q.mean(), "value/error": errors.abs().mean()}, errors

    def explore(self, progress: float) -> None:
        first, last = self.algorithm.epsilon
        self.network.epsilon.fill_(first + (last - first) * min(1.0, progress / self.algorithm.epsilon_share))


class Temperature(nn.Module):
    """The weight of the entropy, by its logarithm."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(first)))


class Sac:
    """Soft actor-critic with twin critics and a tuned temperature. Haarnoja et al. 2018, arXiv:1812.05905.

    Stored actions are those before tanh; critics see them after it, between -1 and 1 whatever the environment's bounds.
    """

    def __init__(
        self, spaces: Spaces, policy: PolicyConfig, training: TrainingConfig, algorithm: AlgorithmConfig, seed: int
    ) -> None:
        if spaces.action.kind != "box":
            raise ConfigError("algorithm.kind", 'found "sac", but the actions are discrete; use dqn or ppo')
        self.algorithm, self.size = algorithm, len(spaces.action.low)
        self.distribution = distribution_of(spaces.action, squash=True)
        self.network = build_network(spaces, policy, self.distribution.size, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            self.critics = TwinQ(spaces, policy)
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = Temperature(algorithm.temperature)
        self.entropy = -float(self.size) if algorithm.target_entropy is None else algorithm.target_entropy
        self.modules = {
            "actor": self.network,
            "critics": self.critics,
            "target": self.target,
            "temperature": self.temperature,
        }
        self.optimizers = {
            name: _optimizer(self.modules[name], training) for name in ("actor", "critics", "temperature")
        }
        self.generator = torch.Generator().manual_seed(seed)
        self.updates = 0

    def update(self, draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
        algorithm, temperature = self.algorithm, self.temperature.log.detach().exp()
        with torch.no_grad():
            after, after_logprobs = self._act(draw.next_observations)
            next_q = self.target(draw.next_observations, after)
            targets = soft_q_targets(draw.returns, draw.discounts, *next_q, after_logprobs, temperature)
        q = self.critics(draw.observations, torch.tanh(draw.actions))
        critic_loss, errors = twin_q_loss(*q, targets, draw.weights)
        critic_loss.backward()
        self.optimizers["critics"].step()

        self.critics.requires_grad_(False)
        actions, logprobs = self._act(draw.observations)
        actor_loss = soft_policy_loss(logprobs, *self.critics(draw.observations, actions), temperature)
        actor_loss.backward()
        self.critics.requires_grad_(True)
        self.optimizers["actor"].step()

        temperature_loss(self.temperature.log, logprobs, self.entropy).backward()
        self.optimizers["temperature"].step()
        self.updates += 1
        if self.updates % algorithm.target_every == 0:
            follow(self.target.parameters(), self.critics.parameters(), algorithm.target_rate)
        metrics = {
            "loss/total": critic_loss,
            "loss/policy": actor_loss,
            "loss/entropy": -logprobs.mean(),
            "value/mean": q[0].mean(),
            "value/error": errors.mean(),
            "policy/temperature": temperature,
        }
        return metrics, errors

    def _act(self, observations: Leaves) -> tuple[Tensor, Tensor]:
        """[B, k] actions between -1 and 1 of the current policy, with gradient, and [B] their log-probabilities."""
        outputs, _ = self.network.act(observations, {})  # type: ignore[operator]
        noise = self.distribution.noise(outputs.shape[:1], self.generator)
        raw = self.distribution.sample(outputs, noise)
        return torch.tanh(raw), self.distribution.logprobs(outputs, raw)

    def explore(self, progress: float) -> None:
        """The policy explores by itself."""


def _optimizer(module: nn.Module, training: TrainingConfig) -> FlatAdamW:
    return FlatAdamW(FlatParameters(module), training.optimizer, training.steps)


OFF_POLICY: dict[str, type[Dqn] | type[Sac]] = {"dqn": Dqn, "sac": Sac}
