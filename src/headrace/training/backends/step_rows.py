"""Turns a batch of control steps into flat tensors, and cuts them: into minibatches, into chunks that fit the caches, into
shares for the cores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.training.advantages import Credit
from headrace.types import Array, Metrics, Stat, StepBatch

CHUNK_ROWS, CHUNK_NUMBERS = 4096, 2**22
"""In one forward and backward pass: at most so many rows, and rows of so many numbers (an image has thousands)."""
ROWS_WORTH_A_CORE = 1024
"""Fewer are not worth another core."""
Part = Tensor | slice
"""Indices of rows, or a range of them."""


class Rows:
    """The steps of a batch as flat tensors [T*B, ...], without a copy."""

    def __init__(self, batch: StepBatch) -> None:
        self.steps, self.count = batch.rewards.shape
        self.leaves = {name: _tensor(leaf) for name, leaf in batch.observations.items()}
        self.observations = {name: leaf[:-1].flatten(0, 1) for name, leaf in self.leaves.items()}
        self.actions = _tensor(batch.actions).flatten(0, 1)
        self.behavior_logprobs = _tensor(batch.behavior_logprobs).flatten()
        self.weights = _tensor(batch.valid).flatten().float()
        self._resets = _tensor(batch.resets)
        self._initial = {n: _tensor(s) for n, s in (batch.initial_state or {}).items()}

    def fill(self, found: tuple[Array, Credit]) -> None:
        values, credit = found
        self.values, self.advantages, self.targets = (
            torch.from_numpy(np.ascontiguousarray(a, np.float32)).flatten()
            for a in (values, credit.advantages, credit.targets)
        )

    def minibatches(self, parts: int, generator: torch.Generator, whole_sequences: bool) -> Sequence[Part]:
        """Indices of rows, or of whole sequences for a network with a memory, in a new order."""
        if parts == 1 and not whole_sequences:
            return [slice(None)]
        size = self.count if whole_sequences else self.steps * self.count
        return torch.randperm(size, generator=generator, device=generator.device).tensor_split(parts)

    def shown(self, part: Part) -> dict[str, Tensor]:
        """Leaves [M, ...] of some rows. Whole rows are copied at a time, which indexing with a tensor would not do."""
        chosen = (lambda leaf: leaf[part]) if isinstance(part, slice) else (lambda leaf: leaf.index_select(0, part))
        return {name: chosen(leaf) for name, leaf in self.observations.items()}

    def shares(self, part: Part, cores: int, whole: int = 1, fused: bool = False) -> list[list[Part]]:
        """For each of at most so many cores its chunks: `CHUNK_ROWS` rows, or fewer if a row has many numbers or there are
        more cores than chunks; rows come in wholes of `whole`. fused: a chunk for each core, which runs through caches by itself"""
        size = sum(leaf[0].numel() for leaf in self.observations.values())
        most = min(CHUNK_ROWS, max(CHUNK_NUMBERS // size, 64))
        total = len(part) if isinstance(part, Tensor) else self.steps * self.count
        cores = max(1, min(cores, total // ROWS_WORTH_A_CORE))
        each = -(-total // cores)
        rows = -(-(each if fused else min(most, each)) // whole) * whole
        chunks = [slice(first, min(first + rows, total)) for first in range(0, total, rows)]
        chunks = [part[chunk] for chunk in chunks] if isinstance(part, Tensor) else chunks
        each = -(-len(chunks) // cores)
        return [chunks[first : first + each] for first in range(0, len(chunks), each)]

    def sequences(self, part: Part) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Leaves [T, B', ...], resets [T, B'], states [B', ...] of some of the environments."""
        leaves = {name: leaf[:-1][:, part] for name, leaf in self.leaves.items()}
        return leaves, self._resets[:, part], {name: state[part] for name, state in self._initial.items()}

    def rows_of(self, part: Part) -> Tensor:
        """[T*B'] rows of whole sequences, time first."""
        chosen = torch.arange(self.count)[part]
        return (torch.arange(self.steps)[:, None] * self.count + chosen).flatten()

    def explained_variance(self) -> Metrics:
        """Of the targets by the values before the update: 1 is perfect, 0 no better than their mean."""
        kept = self.weights.cpu().numpy() > 0  # numpy picks rows five times as fast
        targets, values = (one.detach().cpu().numpy()[kept].astype(np.float64) for one in (self.targets, self.values))
        if len(targets) < 2:
            return {}
        spread = float(targets.var())
        return {"value/explained_variance": Stat(1 - float((targets - values).var()) / spread if spread else 0.0)}


def _tensor(array: Array) -> Tensor:
    """The array's own memory; a copy of what was read from a message, which nobody may write to (and torch warns of)."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
