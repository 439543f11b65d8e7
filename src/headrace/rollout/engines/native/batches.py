"""Turns sequences and the pieces of them that are due into the arrays of one forward pass."""

from __future__ import annotations

import torch

from headrace.rollout.engines.native.attention import Pass, Stretch
from headrace.rollout.engines.sequences import Sequence

FIXED_PREFILL = 64
"""Rows of a prefill pass when shapes are fixed."""

Piece = tuple[Sequence, int]
"""A sequence that catches up, and how many of its next tokens are in the pass."""


class Batcher:
    """Knows where tokens are kept: slot = block * block_size + place in it. `spare` is a slot that nobody reads."""

    def __init__(self, block_size: int, spare: int) -> None:
        self.block_size, self.spare = block_size, spare

    def ragged(self, pieces: list[Piece], decoding: list[Sequence]) -> Pass:
        """As many rows as there are tokens: the pieces' first, then one for each sequence that decodes."""
        ids, positions, slots, stretches, logit_rows = [], [], [], [], []
        for sequence, count in pieces:
            first, stop = sequence.kv_length, sequence.kv_length + count
            where = self._slots(sequence, stop)
            stretches.append(Stretch(len(ids), len(ids) + count, torch.tensor(where)))
            ids += sequence.ids[first:stop]
            positions += range(first, stop)
            slots += where[first:]
            if stop == len(sequence.ids):
                logit_rows.append(len(ids) - 1)
        decode_start = len(ids)
        at = [one.kv_length for one in decoding]
        logit_rows += range(decode_start, decode_start + len(at))
        ids += [one.ids[place] for one, place in zip(decoding, at, strict=True)]
        positions += at
        slots += [self.next_slot(one) for one in decoding]
        return Pass(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            stretches=stretches,
            decode_start=decode_start,
            tables=self._tables(decoding),
            lengths=torch.tensor(at) + 1 if decoding else None,
            logit_rows=torch.tensor(logit_rows, dtype=torch.long),
        )

    def fixed_piece(self, sequence: Sequence, count: int) -> Pass:
        """A piece among `FIXED_PREFILL` rows, each token in the row, and over as many keys, as its position says: what
        is computed for it does not depend on how much of the prompt was known already."""
        first, stop = sequence.kv_length, sequence.kv_length + count
        base = first - first % FIXED_PREFILL
        where = self._slots(sequence, stop)
        before, after = first - base, base + FIXED_PREFILL - stop
        return Pass(
            token_ids=torch.tensor([0] * before + sequence.ids[first:stop] + [0] * after),
            positions=torch.arange(base, base + FIXED_PREFILL).clamp_(max=stop - 1),
            slots=torch.tensor([self.spare] * before + where[first:] + [self.spare] * after),
            stretches=[Stretch(0, FIXED_PREFILL, torch.tensor(where + where[:1] * after))],
            decode_start=FIXED_PREFILL,
            tables=None,
            lengths=None,
            logit_rows=torch.tensor([stop - 1 - base]),
            one_by_one=True,
        )

    def fixed_decode(self, decoding: list[Sequence], rows: int) -> Pass:
        """One row for each sequence, and padding up to `rows`, each sequence attending alone."""
        padding = rows - len(decoding)
        return Pass(
            token_ids=torch.tensor([one.ids[one.kv_length] for one in decoding] + [0] * padding),
            positions=torch.tensor([one.kv_length for one in decoding] + [0] * padding),
            slots=torch.tensor([self.next_slot(one) for one in decoding] + [self.spare] * padding),
            stretches=[],
            decode_start=0,
            tables=self._tables(decoding),
            lengths=torch.tensor([one.kv_length + 1 for one in decoding]),
            logit_rows=torch.arange(rows),
            one_by_one=True,
        )

    def next_slot(self, sequence: Sequence) -> int:
        """Where its next token's keys and values go."""
        size, at = self.block_size, sequence.kv_length
        return sequence.blocks[at // size] * size + at % size

    def _slots(self, sequence: Sequence, count: int) -> list[int]:
        """Where the first `count` tokens of a sequence are kept."""
        size = self.block_size
        return [block * size + at for block in sequence.blocks[: -(-count // size)] for at in range(size)][:count]

    def slots(self, blocks: list[int], count: int) -> torch.Tensor:
        """[count] where the tokens in `blocks` are kept."""
        size = self.block_size
        return (torch.tensor(blocks)[:, None] * size + torch.arange(size)).view(-1)[:count]

    def _tables(self, decoding: list[Sequence]) -> torch.Tensor | None:
        """[D, L] where the tokens of each sequence are kept, padded to the longest."""
        if not decoding:
            return None
        longest = max(one.kv_length + 1 for one in decoding)
        blocks = -(-longest // self.block_size)
        table = torch.tensor([(one.blocks + [0] * blocks)[:blocks] for one in decoding])
        slots = (table[:, :, None] * self.block_size + torch.arange(self.block_size)).view(len(decoding), -1)
        slots = slots[:, :longest]
        lengths = torch.tensor([one.kv_length + 1 for one in decoding])
        # Padding points at a slot that has been written: what memory holds before that may be anything, NaN too.
        return torch.where(torch.arange(longest) < lengths[:, None], slots, slots[:, :1])
