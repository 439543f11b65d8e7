"""Turns the numbers of a policy head into actions, their log-probabilities and entropies.

Sampling takes its noise from outside, drawn for a whole trajectory at once: a step then costs two operations, and a
seeded run repeats whatever the shapes of the batches.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.policies.spaces import ActionSpec
from headrace.types import Array

MIN_LOG_STD, MAX_LOG_STD = -10.0, 2.0


class Distribution(Protocol):
    """`size` numbers of the policy head a step. Leading shapes of all arguments are free and equal."""

    size: int

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What `sample` needs for so many draws."""
        ...

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The action as it is stored: log-probabilities are those of *it*, not of what the environment is given."""
        ...

    def mode(self, outputs: Tensor) -> Tensor: ...

    def logprobs(self, outputs: Tensor, actions: Tensor) -> Tensor: ...

    def logprobs_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]: ...

    def to_environment(self, actions: Array) -> Array:
        """[N, ...] stored actions in the environment's own terms (started from its lowest, clipped or squashed)."""
        ...

    def to_simulator(self, actions: Tensor) -> Tensor:
        """The same for tensors, on the device where they are."""
        ...


def distribution_of(spec: ActionSpec, squash: bool = False) -> Distribution:
    """The distribution over a kind of actions."""
    if spec.kind == "box":
        return Gaussian(spec, squash)
    return Categorical(spec) if not spec.shape else MultiCategorical(spec)


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Added to logits, the largest is a sample. From uniform numbers, whose logarithms cost a quarter of exponential ones."""
    return torch.empty(shape, device=generator.device).uniform_(generator=generator).log_().neg_().log_().neg_()


class Categorical:
    """One whole number: outputs [..., n] are logits, actions [...] int64 from 0 on."""

    def __init__(self, spec: ActionSpec) -> None:
        (self.size,), (self.start,) = spec.sizes, spec.starts

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """[..., n] Gumbel variates."""
        return gumbel((*shape, self.size), generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return (outputs + noise).argmax(-1)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def logprobs(self, outputs: Tensor, actions: Tensor) -> Tensor:
        return functional.log_softmax(outputs, -1).gather(-1, actions[..., None])[..., 0]

    def logprobs_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logs = functional.log_softmax(outputs, -1)
        return logs.gather(-1, actions[..., None])[..., 0], -(logs.exp() * logs).sum(-1)

    def to_environment(self, actions: Array) -> Array:
        return actions + self.start if self.start else actions

    def to_simulator(self, actions: Tensor) -> Tensor:
        return actions + self.start if self.start else actions


class MultiCategorical:
    """Several independent whole numbers: outputs [..., sum of sizes], actions [..., *shape]."""

    def __init__(self, spec: ActionSpec) -> None:
        self.sizes, self.shape = list(spec.sizes), spec.shape
        self.size = sum(self.sizes)
        self.starts = np.array(spec.starts, np.int64).reshape(spec.shape)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return gumbel((*shape, self.size), generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return self.mode(outputs + noise)

    def mode(self, outputs: Tensor) -> Tensor:
        parts = [part.argmax(-1) for part in outputs.split(self.sizes, -1)]
        return torch.stack(parts, -1).reshape(*outputs.shape[:-1], *self.shape)

    def logprobs(self, outputs: Tensor, actions: Tensor) -> Tensor:
        return self.logprobs_and_entropy(outputs, actions)[0]

    def logprobs_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        flat = actions.reshape(*outputs.shape[:-1], len(self.sizes))
        total, entropy = outputs.new_zeros(outputs.shape[:-1]), outputs.new_zeros(outputs.shape[:-1])
        for index, part in enumerate(outputs.split(self.sizes, -1)):
            logs = functional.log_softmax(part, -1)
            total = total + logs.gather(-1, flat[..., index : index + 1])[..., 0]
            entropy = entropy - (logs.exp() * logs).sum(-1)
        return total, entropy

    def to_environment(self, actions: Array) -> Array:
        return actions + self.starts

    def to_simulator(self, actions: Tensor) -> Tensor:
        return actions + torch.as_tensor(self.starts, device=actions.device)


class Gaussian:
    """Independent normals: outputs [..., 2k] are means and log deviations, actions [..., k] as drawn.

    clipped (default): the environment gets the action clipped to its bounds, the log-probability is that of the drawn one.
    squash: the environment gets low + (tanh(a) + 1) / 2 (high - low); the log-probability has the change of variables of
    the tanh in it (Haarnoja et al. 2018, arXiv:1801.01290, appendix C), not the constant of the scale. Its entropy is that
    of the normal before tanh.
    """

    def __init__(self, spec: ActionSpec, squash: bool) -> None:
        self.k, self.shape, self.squash = len(spec.low), spec.shape, squash
        self.size = 2 * self.k
        self.low, self.high = np.array(spec.low, np.float32), np.array(spec.high, np.float32)
        self.dtype = np.dtype(spec.dtype)
        if squash and not (np.isfinite(self.low).all() and np.isfinite(self.high).all()):
            from headrace.errors import ConfigError

            raise ConfigError("policy.squash", "found true with actions that have no bounds; set it to false")

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.empty(*shape, self.k, device=generator.device).normal_(generator=generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._parts(outputs)
        return mean + log_std.exp() * noise

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs[..., : self.k]

    def logprobs(self, outputs: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = self._parts(outputs)
        logs = -0.5 * ((actions - mean) * (-log_std).exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
        return logs.sum(-1) - self.folds(actions) if self.squash else logs.sum(-1)

    def folds(self, actions: Tensor) -> Tensor:
        """[...] what squashing takes from log-probabilities: the sum of log(1 - tanh(a)^2), without cancellation."""
        if not self.squash:
            return actions.new_zeros(actions.shape[:-1])
        return 2 * (math.log(2) - actions - functional.softplus(-2 * actions)).sum(-1)

    def logprobs_and_entropy(self, outputs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        _, log_std = self._parts(outputs)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
        return self.logprobs(outputs, actions), entropy

    def to_environment(self, actions: Array) -> Array:
        if self.squash:
            bounded = self.low + (np.tanh(actions) + 1) / 2 * (self.high - self.low)
        else:
            bounded = np.clip(actions, self.low, self.high)
        return bounded.reshape(len(actions), *self.shape).astype(self.dtype, copy=False)

    def to_simulator(self, actions: Tensor) -> Tensor:
        low, high = (torch.as_tensor(bound, device=actions.device) for bound in (self.low, self.high))
        if self.squash:
            return low + (torch.tanh(actions) + 1) / 2 * (high - low)
        return actions.clamp(low, high)

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = outputs.split(self.k, -1)
        return mean, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)
