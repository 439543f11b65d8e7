"""Turns the scattered blocks of sequences that decode into lanes: contiguous copies that one batched product reads in place.

Blocks stay the truth: a lane is filled from them when a sequence begins to decode, takes each further token beside them, and
may be dropped at any time. Siblings hold a lane each for what is their own, from the first block on that they do not share,
and one in common for the blocks of their prompt, which is read once for all of them (cascade attention: Ye et al. 2024,
FlashInfer; Juravsky et al. 2024, Hydragen). The two parts are joined by the logs of their sums of exponentials.

Lanes lie on shelves by capacity, so that a long sequence does not pad short ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from headrace.rollout.engines.native.attention import KeyValues
from headrace.rollout.engines.native.batches import Batcher
from headrace.rollout.engines.sequences import Sequence

_SMALLEST = 64
"""Tokens of the smallest lane; each shelf's are twice as long as the last one's."""
_AHEAD = 64
"""A new lane has room for so many tokens more than there are, or all that may come."""

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""Attention that also gives the logs of its sums. Private to torch."""
LANES_POSSIBLE = _flash is not None
"""Where not, blocks are gathered in every pass."""

Blocks = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Lane:
    """Tokens [start, start + filled) of its readers, in one row of a shelf."""

    shelf: Shelf
    row: int
    start: int
    readers: list[Sequence] = field(default_factory=list)
    filled: int = 0


class Shelf:
    """Lanes of one capacity, row after row without holes. keys, values: layer -> [rows, kv_heads, capacity, D]"""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lanes: list[Lane] = []
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def remove(self, lane: Lane) -> None:
        """The last row moves into the one that becomes free."""
        last = self.lanes.pop()
        if last is not lane:
            for store in (self.keys, self.values):
                for memory in store.values():
                    memory[lane.row, :, : last.filled] = memory[last.row, :, : last.filled]
            last.row, self.lanes[lane.row] = lane.row, last

    def fill(self, lane: Lane, slots: torch.Tensor, store: KeyValues) -> None:
        """slots: [n] where the lane's next n tokens are kept."""
        stop = lane.filled + slots.numel()
        for source, target in ((store.keys, self.keys), (store.values, self.values)):
            for layer, memory in source.items():
                tokens = memory.index_select(0, slots)
                self._roomy(target, layer, tokens)[lane.row, :, lane.filled : stop] = tokens.transpose(0, 1)
        lane.filled = stop

    def write(
        self, layer: int, rows: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """rows, places: [n] where one token each of n lanes goes; keys, values: [n, kv_heads, D]"""
        for target, tokens in ((self.keys, keys), (self.values, values)):
            self._roomy(target, layer, tokens)[rows, :, places] = tokens

    def _roomy(self, store: dict[int, torch.Tensor], layer: int, like: torch.Tensor) -> torch.Tensor:
        """The layer's memory, with a row for every lane. like: [n, kv_heads, D]"""
        memory = store.get(layer)
        if memory is None or memory.shape[0] < len(self.lanes):
            rows = max(4, 2 * (memory.shape[0] if memory is not None else 0), len(self.lanes))
            # Cleared: what no reader may see must still be a number, or it would spoil the product.
            grown = like.new_zeros(rows, like.shape[1], self.capacity, like.shape[2])
            if memory is not None:
                grown[: memory.shape[0]] = memory
            memory = store[layer] = grown
        return memory


@dataclass(slots=True)
class Part:
    """What one pass reads of a shelf: its lanes [0, n), each by up to `width` readers, who are rows of the pass.

    readers: [n * width] rows, padded; longest: most tokens in a lane; bias: [n, 1, 1, longest]
    rows: [m] whose results are meant; picks: [m] where they stand among n * width; places: [m] of their lanes' last tokens
    """

    shelf: Shelf
    width: int
    readers: torch.Tensor
    longest: int
    bias: torch.Tensor
    rows: torch.Tensor
    picks: torch.Tensor
    places: torch.Tensor

    def read(self, layer: int, query: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """query [R, heads, D] into outputs [m, heads, D] and logs of the sums of exponentials [m, heads]."""
        count, (heads, size) = len(self.shelf.lanes), query.shape[1:]
        keys, values = (kept[layer][:count, :, : self.longest] for kept in (self.shelf.keys, self.shelf.values))
        groups = keys.shape[1]
        shape = (count, self.width, groups, heads // groups)
        # The query heads of one key head, of all readers, are the rows of one product.
        rows = query.index_select(0, self.readers).view(*shape, size).transpose(1, 2)
        out, total = _flash(rows.reshape(count, groups, -1, size), keys, values, attn_mask=self.bias, scale=scaling)
        back = (count, groups, self.width, heads // groups)
        out = out.reshape(*back, size).transpose(1, 2).reshape(-1, heads, size)
        total = total.reshape(back).transpose(1, 2).reshape(-1, heads)
        return out.index_select(0, self.picks), total.index_select(0, self.picks)


@dataclass(slots=True)
class LanePlan:
    """How the decoding rows of one pass attend: each over a lane of its own, and some over one in common too."""

    own: list[Part]
    shared: list[Part]

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [R, heads, D], keys and values [R, kv_heads, D] into [R, heads, D]; keys and values are written first."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        totals = query.new_empty(query.shape[:2], dtype=torch.float32)
        for part in self.own:
            part.shelf.write(layer, part.picks, part.places, keys[part.rows], values[part.rows])
            found, total = part.read(layer, query, scaling)
            out.index_copy_(0, part.rows, found)
            totals.index_copy_(0, part.rows, total)
        for part in self.shared:
            found, total = part.read(layer, query, scaling)
            share = torch.sigmoid(total - totals[part.rows]).to(out.dtype)
            out.index_copy_(0, part.rows, torch.lerp(out[part.rows], found, share[:, :, None]))
        return out


@dataclass
class Lanes:
    """All lanes of an engine, at most `limit` tokens of them."""

    store: KeyValues
    batcher: Batcher
    limit: int
    _own: dict[Sequence, Lane] = field(default_factory=dict)
    _shared: dict[Blocks, Lane] = field(default_factory=dict)
    _shelves: dict[tuple[str, int], Shelf] = field(default_factory=dict)

    def plan(self, decoding: list[Sequence]) -> LanePlan | None:
        """Lanes for all of them, with room for a token more in each one's own. None when memory does not allow it."""
        alike = Counter(map(self._prompt_blocks, decoding))
        if not decoding or not all(self._ready(sequence, alike) for sequence in decoding):
            return None
        for sequence in decoding:
            self._own[sequence].filled += 1
        row_of = {sequence: row for row, sequence in enumerate(decoding)}
        parts = [(kind, _part(shelf, row_of)) for (kind, _), shelf in self._shelves.items() if shelf.lanes]
        own, shared = ([part for kind, part in parts if kind == wanted] for wanted in ("own", "shared"))
        return LanePlan(own, shared)

    def leave(self, sequence: Sequence) -> None:
        """It does not decode any more, or its blocks are no longer its own."""
        lane = self._own.pop(sequence, None)
        if lane is None:
            return
        lane.shelf.remove(lane)
        for key, common in list(self._shared.items()):
            if sequence in common.readers:
                common.readers.remove(sequence)
                if not common.readers:
                    common.shelf.remove(common)
                    del self._shared[key]

    def drop(self) -> None:
        """Give all memory back."""
        for kept in (self._own, self._shared, self._shelves):
            kept.clear()

    def _ready(self, sequence: Sequence, alike: Counter[Blocks]) -> bool:
        """Whether it has a lane with all its tokens, and room for the next."""
        lane = self._own.get(sequence)
        if lane is not None and sequence.kv_length - lane.start >= lane.shelf.capacity:
            self.leave(sequence)
            lane = None
        lane = lane or self._enter(sequence, alike)
        if lane is not None:
            self._fill(lane, sequence, sequence.kv_length)
        return lane is not None

    def _enter(self, sequence: Sequence, alike: Counter[Blocks]) -> Lane | None:
        """A lane of its own for what it shares with nobody who decodes, and its place at the common one."""
        blocks = self._prompt_blocks(sequence)
        start = len(blocks) * self.batcher.block_size if alike[blocks] > 1 or blocks in self._shared else 0
        coming = min(max(sequence.limit - sequence.count, 0), _AHEAD)
        own = self._lane("own", sequence.kv_length - start + 1 + coming, start)
        common = self._shared.get(blocks) or self._lane("shared", start, 0) if start and own else None
        if own is None or (start and common is None):
            if own is not None:
                own.shelf.remove(own)
            return None
        if common is not None:
            self._shared[blocks] = common
            self._fill(common, sequence, start)
            common.readers.append(sequence)
        own.readers.append(sequence)
        self._own[sequence] = own
        return own

    def _lane(self, kind: str, tokens: int, start: int) -> Lane | None:
        capacity = max(_SMALLEST, 1 << (tokens - 1).bit_length())
        taken = sum(shelf.capacity * len(shelf.lanes) for shelf in self._shelves.values())
        if taken + capacity > self.limit:
            return None
        shelf = self._shelves.setdefault((kind, capacity), Shelf(capacity))
        shelf.lanes.append(Lane(shelf, len(shelf.lanes), start))
        return shelf.lanes[-1]

    def _fill(self, lane: Lane, sequence: Sequence, stop: int) -> None:
        if (first := lane.start + lane.filled) < stop:
            lane.shelf.fill(lane, self.batcher.slots(sequence.blocks, stop)[first:], self.store)

    def _prompt_blocks(self, sequence: Sequence) -> Blocks:
        """The whole blocks of its prompt that are computed, which siblings share."""
        known = min(sequence.prompt_length, sequence.kv_length)
        return tuple(sequence.blocks[: known // self.batcher.block_size])


def _part(shelf: Shelf, row_of: dict[Sequence, int]) -> Part:
    lengths = torch.tensor([lane.filled for lane in shelf.lanes])
    longest, width = int(lengths.max()), max(len(lane.readers) for lane in shelf.lanes)
    hidden = torch.arange(longest) >= lengths[:, None]
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
    readers = torch.zeros(len(shelf.lanes) * width, dtype=torch.long)
    places = [(lane.row * width + at, reader) for lane in shelf.lanes for at, reader in enumerate(lane.readers)]
    picks = torch.tensor([place for place, reader in places if reader in row_of], dtype=torch.long)
    rows = torch.tensor([row_of[reader] for _, reader in places if reader in row_of], dtype=torch.long)
    readers[picks] = rows
    return Part(shelf, width, readers, longest, bias, rows, picks, lengths[picks // width] - 1)
