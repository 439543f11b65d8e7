"""Hands the forward passes that an actor acted by to the trainer in the same process, which then needs none of its own.

Exact where a batch is one trajectory, acted out under the very weights that it updates, once: the pass that gave the
actions *is* the pass that the gradient goes back through. It saves what acting costs, and keeps what the backward pass needs
from the time of acting on: as much memory as one pass over the whole batch. A value function apart from the policy is left
to the trainer, which has all cores for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.types import Array

Passes = list[tuple[Tensor, Tensor | None]]
"""Outputs [N, P] and values [N], if acting needed their features, of T steps, with their graph."""


class SharedPass:
    """network: the trainer's own, set when it is built; `changes` counts its updates."""

    def __init__(self) -> None:
        self.network: nn.Module | None = None
        self.changes = 0
        self._found: tuple[int, Passes, Array] | None = None

    def evaluate(self, observations: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """One step of `Passes`."""
        network: Any = self.network
        with torch.enable_grad():
            return (network.act(observations, {})[0], None) if network.values_apart else network.evaluate(observations)

    def keep(self, changes: int, passes: Passes, logprobs: Array) -> None:
        """What T steps gave, begun when `changes` was so; logprobs: [T, N] by which the trainer knows them again."""
        self._found = (changes, passes, logprobs)

    def take(self, logprobs: Array) -> Passes | None:
        """Those of the steps of these log-probabilities [T, N]; None if they were not kept, or the network has changed since."""
        found, self._found = self._found, None
        if found is None or found[0] != self.changes or not np.array_equal(found[2], logprobs):
            return None
        return found[1]
