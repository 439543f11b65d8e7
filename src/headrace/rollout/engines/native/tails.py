"""Copies the beginnings of shared blocks for those who fill them further in their own way."""

from __future__ import annotations

import numpy as np
import torch

from headrace.rollout.engines.native.attention import KeyValues
from headrace.rollout.engines.native.blocks import BlockTable


class Tails:
    """Copies that are due before the next pass, made all at once. What is copied from is held until then."""

    def __init__(self, table: BlockTable, store: KeyValues) -> None:
        self._table, self._store = table, store
        self.waiting: list[tuple[int, int, int]] = []
        """(block, block to copy to, tokens)"""

    def copy_later(self, block: int, to: int, tokens: int) -> None:
        self._table.hold([block])
        self.waiting.append((block, to, tokens))

    def copy(self) -> None:
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        sources, targets, counts = np.array(waiting).T
        at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = [np.repeat(blocks * self._table.block_size, counts) + at for blocks in (sources, targets)]
        self._store.copy(*map(torch.from_numpy, slots))
        self._table.release([block for block, _, _ in waiting])
