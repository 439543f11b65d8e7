"""Tells which sequences have the same tokens behind them, so that one row of a forward pass serves them all.

Siblings start from the same prompt, and go on alike while they draw the same tokens: answers of few tokens, and those of
a model that is nearly sure, are mostly the same. What training computes once (`training.packed`) is so generated once. They
fill the same block, too, until they part: the others then get copies of what is in it.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import torch

from headrace.rollout.engines.native.attention import KeyValues
from headrace.rollout.engines.native.blocks import BlockTable
from headrace.rollout.engines.sequences import Sequence


class Histories:
    """Gives those the same number that began at the same place and drew the same tokens since. Numbers are never used again,
    so a sequence that lost its keys and values, and with them its number, shares with nobody until it starts anew."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._after: dict[tuple[int, int], int] = {}

    def begin(self) -> int:
        return next(self._numbers)

    def grow(self, sequences: list[Sequence]) -> None:
        """Each has drawn a token."""
        for one in sequences:
            if one.history:
                one.history = self._after.setdefault((one.history, one.ids[-1]), next(self._numbers))

    def forget(self) -> None:
        """Who draws from now on shares with nobody who drew before: once all have drawn that went into a pass together."""
        self._after.clear()


def distinct(sequences: list[Sequence]) -> tuple[list[Sequence], list[int]]:
    """The first of each history, and for every sequence the place of its own history's among them."""
    firsts: list[Sequence] = []
    places: list[int] = []
    found: dict[int, int] = {}
    for one in sequences:
        place = found.setdefault(one.history, len(firsts)) if one.history else len(firsts)
        if place == len(firsts):
            firsts.append(one)
        places.append(place)
    return firsts, places


class Tails:
    """Copies of the beginnings of blocks, for those who fill them further in their own way: due before the next pass, and made
    all at once. What is copied from is held until then."""

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
