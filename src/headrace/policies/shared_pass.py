"""Hands the forward passes that an actor acted by to the trainer in the same process, which then needs none of its own.

Exact where a batch is one trajectory, acted out under the very weights that it updates, once: the pass that gave the
actions *is* the pass that the gradient goes back through. It saves a quarter of a batch's arithmetic, and keeps what the
backward pass needs from the time of acting on: as much memory as one pass over the whole batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from headrace.types import Array


class SharedPass:
    """network: the trainer's own, set when it is built; `changes` counts its updates."""

    def __init__(self) -> None:
        self.network: nn.Module | None = None
        self.changes = 0
        self._found: tuple[int, list[tuple[Tensor, Tensor]], Array] | None = None

    def evaluate(self, observations: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs [N, P] and values [N] of one step, with their graph."""
        assert self.network is not None
        with torch.enable_grad():
            return self.network.evaluate(observations)  # type: ignore[operator]

    def keep(self, changes: int, passes: list[tuple[Tensor, Tensor]], logprobs: Array) -> None:
        """What T steps gave, begun when `changes` was so; logprobs: [T, N] by which the trainer knows them again."""
        self._found = (changes, passes, logprobs)

    def take(self, logprobs: Array) -> tuple[Tensor, Tensor] | None:
        """Outputs [T*N, P] and values [T*N] of the steps of these log-probabilities [T, N]; None if they were not kept, or
        the network has changed since."""
        found, self._found = self._found, None
        if found is None or found[0] != self.changes or not np.array_equal(found[2], logprobs):
            return None
        outputs, values = zip(*found[1], strict=True)
        return torch.cat(outputs), torch.cat(values)
