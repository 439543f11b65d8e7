"""What sequences with the same tokens behind them have in common: a row of a forward pass, and the blocks of their keys and values.

Siblings start from the same prompt, and go on alike while they draw the same tokens: answers of few tokens, and those of
a model that is nearly sure, are mostly the same. What training computes once (`training.packed`) is so generated once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import torch

from headrace.rollout.engines.native.attention import KeyValues
from headrace.rollout.engines.native.blocks import BlockTable, Match
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


class Places:
    """Gives sequences the blocks that their keys and values go to, shared where they have the same tokens. What one is to fill
    further in its own way is copied for it: before the next pass, all at once, and held until then."""

    def __init__(self, table: BlockTable, store: KeyValues) -> None:
        self._table, self._store, self._size = table, store, table.block_size
        self.waiting: list[tuple[int, int, int]] = []
        """(block, block to copy to, tokens)"""

    def give(self, sequence: Sequence, match: Match) -> bool:
        """Blocks for all tokens of a sequence, shared where they are known. False when there is no room."""
        count = -(-len(sequence.ids) // self._size) - len(match.blocks)
        # Held before allocating: making room may forget the very blocks that are about to be shared.
        self._table.hold(match.blocks)
        tail = [match.tail] * (match.tail_tokens > 0)
        self._table.hold(tail)
        own = self._allocate(count)
        if own is None and tail:  # what it would copy from may be the last block that there is
            self._table.release(tail)
            own, tail = self._allocate(count), []
        if own is None:
            self._table.release(match.blocks + tail)
            return False
        if tail:
            self._copy_later(match.tail, own[0], match.tail_tokens)
            self._table.release(tail)
        sequence.blocks = match.blocks + own
        sequence.kv_length = len(match.blocks) * self._size + len(tail) * match.tail_tokens
        return True

    def share(self, sequence: Sequence, mate: Sequence) -> None:
        """All blocks of one that has the same tokens."""
        self._table.hold(mate.blocks)
        sequence.blocks, sequence.kv_length = list(mate.blocks), mate.kv_length

    def extend(self, sequences: list[Sequence], preempt_newest: Callable[[], None]) -> None:
        """A place for each one's next token, one for all of a history.

        sequences: oldest first, so that nobody is preempted who has got a place; who was preempted has no blocks. A block that
        several were filling stays with the first history that goes on in it, and the others get copies.
        """
        whose: dict[int, int] = {}
        """Block that is filled further -> the history that does so."""
        place: dict[int, int] = {}
        """History -> block that it goes on in."""
        for sequence in sequences:
            if not sequence.blocks:
                continue  # preempted for an older one
            history = sequence.history or -1 - sequence.arrival
            at, inside = divmod(sequence.kv_length, self._size)
            last = sequence.blocks[at] if at < len(sequence.blocks) else None
            if last is not None and whose.setdefault(last, history) == history:
                place.setdefault(history, last)
                continue
            if history in place:
                self._table.hold([place[history]])
            else:
                while sequence.blocks and (own := self._allocate(1)) is None:
                    preempt_newest()
                if not sequence.blocks:
                    continue  # it was the newest itself
                if last is not None:
                    self._copy_later(last, own[0], inside)
                place[history] = own[0]
            self._table.release(sequence.blocks[at:])
            sequence.blocks[at:] = [place[history]]
        self.copy()

    def copy(self) -> None:
        """What is due."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        sources, targets, counts = np.array(waiting).T
        at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = [np.repeat(blocks * self._size, counts) + at for blocks in (sources, targets)]
        self._store.copy(*map(torch.from_numpy, slots))
        self._table.release([block for block, _, _ in waiting])

    def _allocate(self, count: int) -> list[int] | None:
        got = self._table.allocate(count)
        if got is None and self.waiting:
            self.copy()  # after which what they are copied from is not held for that
            got = self._table.allocate(count)
        return got

    def _copy_later(self, block: int, to: int, tokens: int) -> None:
        self._table.hold([block])
        self.waiting.append((block, to, tokens))
