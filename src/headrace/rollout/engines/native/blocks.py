"""Turns a bounded store of key-value blocks into per-sequence lists of them, shared through a radix tree over their tokens.

A block holds the keys and values of `block_size` tokens. It is *held* while sequences count on it, *cached* while nobody
does but the tree knows its content, and *free* otherwise. What is cached is taken back least recently used first. All
that the tree knows was made by the live weights: a swap clears it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import Any

from headrace.rollout.engines.sequences import Sequence

_ENDS = 64
"""Most remembered ends: one holds a row of logits."""
_TOKENS = attrgetter("tokens")


@dataclass(slots=True, eq=False)
class Node:
    """One block in the tree.

    tokens: what the block holds from its start on; fewer than a block only at the end of a branch
    children: blocks that continue it, in the order of their tokens
    ends: tokens of the block -> what the forward pass said after so many of them
    """

    parent: Node | None
    tokens: tuple[int, ...] = ()
    block: int = -1
    children: list[Node] = field(default_factory=list)
    ends: dict[int, Any] = field(default_factory=dict)

    def closest(self, part: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that shares the longest beginning with `part`, and how long that is: it stands beside the place that
        `part` would have among them."""
        at = bisect_left(self.children, part, key=_TOKENS)
        best, longest = None, 0
        for child in self.children[max(at - 1, 0) : at + 1]:
            shared = len(part) if child.tokens == part else common_length(child.tokens, part)
            if shared > longest:
                best, longest = child, shared
        if best and longest == len(part) and longest not in best.ends:  # better another that knows what came next
            alike = takewhile(lambda child: child.tokens[:longest] == part, self.children[at:])
            best = next((child for child in alike if longest in child.ends), best)
        return best, longest

    def remove(self, child: Node) -> None:
        at = bisect_left(self.children, child.tokens, key=_TOKENS)
        while self.children[at] is not child:  # others may hold the same tokens
            at += 1
        del self.children[at]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known beginning of some tokens.

    blocks: whole blocks of it; tail: a block of which the first `tail_tokens` continue them, to be copied
    end: what was remembered at the end of all tokens, None when that is not known
    """

    blocks: list[int]
    tail: int
    tail_tokens: int
    end: Any

    def length(self, block_size: int) -> int:
        return len(self.blocks) * block_size + self.tail_tokens


NO_MATCH = Match([], -1, 0, None)


class BlockTable:
    """Who holds which block, and what is where."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total, self.block_size = blocks, block_size
        self.counts = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._root = Node(None)
        self._nodes: dict[int, Node] = {}
        self._ends: OrderedDict[tuple[Node, int], None] = OrderedDict()

    @property
    def room(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when so many cannot be had."""
        if self.room < count:
            return None
        got = []
        for _ in range(count):
            if not self._free:
                self._evict()
            block = self._free.pop()
            self.counts[block] = 1
            got.append(block)
        return got

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.counts[block] == 0:
                self._cached.pop(block)
            self.counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Later blocks go first, so that a branch is taken back from its end."""
        for block in reversed(blocks):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                if block in self._nodes:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    # -------------------------------------------------------------------------------------------- the tree

    def remember(self, ids: list[int], blocks: list[int], end: Any = None) -> None:
        """Make `blocks` findable by the tokens that they hold; `end` is what the forward pass said after the last one.

        A block that its holder fills further stays what it is known for: only places after those are written.
        """
        node, path = self._root, []
        for index, part in self._parts(ids):
            child, shared = node.closest(part)
            if child is None or shared < len(part):
                block = blocks[index]
                own = self._nodes.get(block)
                if own is None:
                    child = Node(node, part, block)
                    insort(node.children, child, key=_TOKENS)
                    self._nodes[block] = child
                elif own.parent is node and own.tokens == part[: len(own.tokens)]:
                    node.remove(own)
                    own.tokens, child = part, own
                    insort(node.children, own, key=_TOKENS)
                else:
                    break
            node = child
            path.append(child.block)
        else:
            if end is not None:
                self._remember_end(node, len(part), end)
        # What was used stays; a block is never taken back before those that continue it.
        for block in reversed(path):
            if block in self._cached:
                self._cached.move_to_end(block)

    def match(self, ids: list[int], leave_one: bool = True) -> Match:
        """The longest known beginning of `ids`. With `leave_one` the last token is left to compute, to give logits, unless
        what it gave is known. The caller holds the blocks, and copies the tail, before anything is allocated."""
        node, blocks, tail, tail_tokens = self._root, [], -1, 0
        for _, part in self._parts(ids):
            child, shared = node.closest(part)
            if child is None:
                break
            node = child
            if shared < self.block_size:
                tail, tail_tokens = child.block, shared
                break
            blocks.append(child.block)
        size = self.block_size
        end = None
        if len(blocks) * size + tail_tokens == len(ids):
            end = node.ends.get(tail_tokens or size)
            if end is not None:
                self._ends.move_to_end((node, tail_tokens or size))
            elif leave_one:
                if tail_tokens == 0:
                    tail, tail_tokens = blocks.pop(), size
                tail_tokens -= 1
        return Match(blocks, tail if tail_tokens else -1, tail_tokens, end)

    def clear(self) -> None:
        """Nothing is findable any more; what sequences hold stays theirs."""
        self._root = Node(None)
        self._nodes.clear()
        self._ends.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    # ------------------------------------------------------------------------------------------- housekeeping

    def _parts(self, ids: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        size = self.block_size
        for index in range(-(-len(ids) // size)):
            yield index, tuple(ids[index * size : (index + 1) * size])

    def _remember_end(self, node: Node, length: int, end: Any) -> None:
        node.ends[length] = end
        self._ends[node, length] = None
        self._ends.move_to_end((node, length))
        while len(self._ends) > _ENDS:
            (old, at), _ = self._ends.popitem(last=False)
            del old.ends[at]

    def _evict(self) -> None:
        """Free what was used longest ago. What continues it cannot be found without it, so that goes too."""
        node = self._nodes[next(iter(self._cached))]
        node.parent.remove(node)
        going = [node]
        while going:
            node = going.pop()
            del self._nodes[node.block]
            for at in node.ends:
                del self._ends[node, at]
            if node.block in self._cached:
                del self._cached[node.block]
                self._free.append(node.block)
            going += node.children


class Computing:
    """What the tree does not know yet: sequences that are behind, by the tokens that they are computing."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences
        self._beginnings: dict[int, set[tuple[int, ...]]] = {}
        """Length -> beginnings of that length whose last token is being computed."""

    def add(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        for length, beginnings in self._beginnings.items():
            beginnings.update(self._beginning(sequence, length))

    def has(self, ids: list[int], length: int) -> bool:
        """Whether someone is computing the last of the first `length` tokens of `ids`, after the same ones."""
        if length not in self._beginnings:
            found = (one for sequence in self._sequences for one in self._beginning(sequence, length))
            self._beginnings[length] = set(found)
        return tuple(ids[:length]) in self._beginnings[length]

    def _beginning(self, sequence: Sequence, length: int) -> list[tuple[int, ...]]:
        able = sequence.kv_pure and sequence.kv_length < length <= len(sequence.ids)
        return [tuple(sequence.ids[:length])] if able else []


def common_length(a: tuple[int, ...] | list[int], b: tuple[int, ...] | list[int]) -> int:
    """Length of the longest common beginning."""
    count = 0
    for x, y in zip(a, b):  # noqa: B905 - they may differ in length
        if x != y:
            break
        count += 1
    return count
