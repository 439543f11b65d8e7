"""Turns a bounded store of key-value blocks into per-sequence lists of them, shared wherever tokens are the same.

A block holds the keys and values of `block_size` tokens. It is *held* while sequences or saved prompts count on it,
*cached* while nobody does but its content is known (it can be found again), and *free* otherwise. What is cached is taken
back least recently used first. Everything findable was made by the live weights: a swap clears it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

_PROMPTS = 64


@dataclass(slots=True)
class Prompt:
    """A prompt computed to its end. blocks: all its blocks, the last maybe partial; logits: [V] after its last token."""

    blocks: list[int]
    logits: Any


class BlockTable:
    """Who holds which block, and what is where."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total, self.block_size = blocks, block_size
        self.counts = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when so many cannot be had."""
        while len(self._free) + len(self._cached) < count and self._prompts:
            self._forget_prompt()
        if len(self._free) + len(self._cached) < count:
            return None
        got = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._unname(block)
            self.counts[block] = 1
            got.append(block)
        return got

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.counts[block] == 0:
                self._cached.pop(block)
            self.counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Later blocks go first, so that a chain is taken back from its end."""
        for block in reversed(blocks):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    # -------------------------------------------------------------------------------------------- finding again

    def remember(self, ids: list[int], blocks: list[int]) -> None:
        """Make every full block findable by the tokens up to its end."""
        key = b""
        for index in range(len(ids) // self.block_size):
            key = self._chain(key, ids, index)
            block = blocks[index]
            if key not in self._by_key and block not in self._key_of:
                self._by_key[key], self._key_of[block] = block, key

    def find(self, ids: list[int]) -> list[int]:
        """Blocks, now held, of the longest known beginning of `ids` that leaves a token to compute."""
        found: list[int] = []
        key = b""
        for index in range((len(ids) - 1) // self.block_size):
            key = self._chain(key, ids, index)
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        self.hold(found)
        return found

    def remember_prompt(self, key: bytes, blocks: list[int], logits: Any) -> None:
        if key in self._prompts:
            return
        while len(self._prompts) >= _PROMPTS:
            self._forget_prompt()
        self.hold(blocks)
        self._prompts[key] = Prompt(list(blocks), logits)

    def find_prompt(self, key: bytes) -> Prompt | None:
        prompt = self._prompts.get(key)
        if prompt is not None:
            self._prompts.move_to_end(key)
        return prompt

    def clear(self) -> None:
        """Nothing is findable any more; what sequences hold stays theirs."""
        while self._prompts:
            self._forget_prompt()
        self._by_key.clear()
        self._key_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _forget_prompt(self) -> None:
        _, prompt = self._prompts.popitem(last=False)
        self.release(prompt.blocks)

    def _unname(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._by_key[key]

    def _chain(self, key: bytes, ids: list[int], index: int) -> bytes:
        part = np.array(ids[index * self.block_size : (index + 1) * self.block_size], dtype=np.int64)
        return hashlib.blake2b(key + part.tobytes(), digest_size=16).digest()


def prompt_key(ids: list[int]) -> bytes:
    return hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=16).digest()
