"""Turns waiting requests into packed forward passes over shared key-value blocks: admission, batching, preemption."""

from __future__ import annotations

import time
from typing import Any

import torch

from headrace.protocols import WorkerContext
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.core import Core
from headrace.rollout.engines.models import ModelFacts
from headrace.rollout.engines.native.attention import KeyValues, Pass, Stretch
from headrace.rollout.engines.native.blocks import BlockTable, prompt_key
from headrace.rollout.engines.sampling import Draw, Drawn
from headrace.rollout.engines.sequences import Sequence

_PREFILL_TOKENS = 512
"""Most prompt tokens in one pass, so that a long prompt does not hold up those who decode."""
_FIXED_PREFILL = 64
"""Rows of a prefill pass when shapes are fixed."""
_DEFAULT_KV_TOKENS = 32_768


class NativeCore(Core):
    """Continuous batching: each pass takes one token of every sequence that decodes and a piece of those that catch up."""

    def __init__(
        self,
        context: WorkerContext,
        facts: ModelFacts,
        weights: Any,
        builder: Any,
        channel: Any,
        kv_on_swap: str,
        engine: EngineConfig,
    ) -> None:
        super().__init__(context, facts, weights, channel, kv_on_swap, engine.max_running)
        self._builder = builder
        self.block_size = engine.block_size
        tokens = engine.kv_tokens or min(engine.max_running * facts.context_length, _DEFAULT_KV_TOKENS)
        blocks = max(1, -(-tokens // self.block_size) if not engine.kv_tokens else tokens // self.block_size)
        self.table = BlockTable(blocks, self.block_size)
        self.store = KeyValues(blocks * self.block_size + 1)
        self.fixed = engine.deterministic
        self._leaders: dict[bytes, Sequence] = {}
        self._saved: dict[str, tuple[list[int], list[int]]] = {}
        self._saves = 0

    def longest(self) -> int:
        return min(self.facts.context_length, self.table.total * self.block_size)

    def build(self, tensors: Any, spare: Any) -> Any:
        with torch.inference_mode():
            return self._builder(tensors, spare)

    # ---------------------------------------------------------------------------------------------------- a pass

    @torch.inference_mode()
    def advance(self) -> None:
        start = time.perf_counter()
        self._admit()
        behind = [one for one in self.running if one.kv_length < len(one.ids) - 1 or not one.started]
        caught_up = [one for one in self.running if one not in behind]
        if self.fixed:
            for sequence in behind:
                self._run_pass([(sequence, min(_FIXED_PREFILL, len(sequence.ids) - sequence.kv_length))], [])
            self.prefill_s += time.perf_counter() - start
            start = time.perf_counter()
            caught_up = self._make_room(caught_up)
            if caught_up:
                self._run_pass([], caught_up)
            self.decode_s += time.perf_counter() - start
            return
        caught_up = self._make_room(caught_up)
        pieces, budget = [], _PREFILL_TOKENS
        for sequence in behind:
            if budget and sequence in self.running:
                pieces.append((sequence, min(budget, len(sequence.ids) - sequence.kv_length)))
                budget -= pieces[-1][1]
        if pieces or caught_up:
            self._run_pass(pieces, caught_up)
        took, rows = time.perf_counter() - start, sum(count for _, count in pieces)
        share = rows / max(rows + len(caught_up), 1)
        self.prefill_s += took * share
        self.decode_s += took * (1 - share)

    def _run_pass(self, pieces: list[tuple[Sequence, int]], decoding: list[Sequence]) -> None:
        """One forward pass; every sequence whose last token was in it draws its next one."""
        batch = self._batch(pieces, decoding)
        logits = self.weights.forward(batch, self.store)
        drawing = []
        for sequence, count in pieces:
            sequence.kv_length += count
            if sequence.kv_length == len(sequence.ids):
                self._caught_up(sequence, logits[len(drawing)])
                drawing.append(sequence)
        for sequence in decoding:
            sequence.kv_length += 1
            drawing.append(sequence)
        self.draw(drawing, logits[: len(drawing)])

    def _batch(self, pieces: list[tuple[Sequence, int]], decoding: list[Sequence]) -> Pass:
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
            sequence.started = True
        decode_start = len(ids)
        for sequence in decoding:
            logit_rows.append(len(ids))
            ids.append(sequence.ids[-1])
            positions.append(sequence.kv_length)
            slots.append(
                sequence.blocks[sequence.kv_length // self.block_size] * self.block_size
                + sequence.kv_length % self.block_size
            )
        if self.fixed:
            rows = _FIXED_PREFILL if pieces else self.max_running
            padding = rows - len(ids)
            ids += [0] * padding
            positions += [0] * padding
            slots += [self.store.slots - 1] * padding
            logit_rows += [rows - 1] * ((1 if pieces else rows) - len(logit_rows))
        return Pass(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            stretches=stretches,
            decode_start=decode_start,
            tables=self._tables(decoding),
            lengths=torch.tensor([one.kv_length + 1 for one in decoding]) if decoding else None,
            logit_rows=torch.tensor(logit_rows, dtype=torch.long),
            one_by_one=self.fixed,
        )

    def _slots(self, sequence: Sequence, count: int) -> list[int]:
        """Where the first `count` tokens of a sequence are kept."""
        size = self.block_size
        return [block * size + at for block in sequence.blocks for at in range(size)][:count]

    def _tables(self, decoding: list[Sequence]) -> torch.Tensor | None:
        if not decoding:
            return None
        longest = max(one.kv_length + 1 for one in decoding)
        blocks = -(-longest // self.block_size)
        table = torch.tensor([(one.blocks + [0] * blocks)[:blocks] for one in decoding])
        slots = (table[:, :, None] * self.block_size + torch.arange(self.block_size)).view(len(decoding), -1)[
            :, :longest
        ]
        lengths = torch.tensor([one.kv_length + 1 for one in decoding])
        # Padding points at a slot that has been written: what memory holds before that may be anything, NaN too.
        return torch.where(torch.arange(longest) < lengths[:, None], slots, slots[:, :1])

    def sample(self, logits: Any, draws: list[Draw]) -> list[Drawn | None]:
        if not self.fixed:
            return super().sample(logits, draws)
        return [super(NativeCore, self).sample(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]

    # ------------------------------------------------------------------------------------- admission and preemption

    def _admit(self) -> None:
        """First come, first served, while blocks last. A sibling of a prompt that is being computed waits for it."""
        drawing: list[tuple[Sequence, Any]] = []
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_running:
                break
            if not self.admissible(sequence):
                continue
            key = prompt_key(sequence.ids)
            if key in self._leaders:
                continue
            fresh = not sequence.started
            logits = self._give_blocks(sequence, key)
            if logits is False:
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if fresh:
                self.prompt_tokens += len(sequence.ids)
                self.cached_prompt_tokens += sequence.kv_length
            else:
                self.recomputed_tokens += len(sequence.ids) - sequence.kv_length
            if logits is not None:
                sequence.started = True
                drawing.append((sequence, logits))
            elif sequence.kv_length < len(sequence.ids) - 1 or fresh:
                self._leaders[key] = sequence
        self.running.sort(key=lambda one: one.arrival)
        if drawing:
            self.draw([one for one, _ in drawing], torch.stack([logits for _, logits in drawing]))

    def _give_blocks(self, sequence: Sequence, key: bytes) -> Any:
        """Blocks for all tokens of a sequence, shared where they are known. Returns the logits after its last token when
        they are known too, None when not, False when there is no room."""
        size, handle = self.block_size, sequence.request.kv_handle
        wanted = -(-len(sequence.ids) // size)
        if handle in self._saved and self._restore(sequence, *self._saved.pop(handle)):
            return None
        prompt = self.table.find_prompt(key)
        if prompt is not None:
            whole = len(sequence.ids) // size
            shared = prompt.blocks[:whole]
            # Held before allocating: making room may forget the very prompt that is about to be shared.
            self.table.hold(prompt.blocks)
            own = self.table.allocate(wanted - whole)
            if own is None:
                self.table.release(prompt.blocks)
            else:
                if own:
                    self.store.copy(prompt.blocks[whole] * size, own[0] * size, len(sequence.ids) % size)
                self.table.release(prompt.blocks[whole:])
                sequence.blocks, sequence.kv_length = shared + own, len(sequence.ids)
                return prompt.logits
            return self._no_room()
        found = self.table.find(sequence.ids)
        own = self.table.allocate(wanted - len(found))
        if own is None:
            self.table.release(found)
            return self._no_room()
        sequence.blocks, sequence.kv_length = found + own, len(found) * size
        return None

    def _no_room(self) -> bool:
        """Nothing runs that could end and make room: what was saved for later goes."""
        if not self.running and self._saved:
            self._drop_saved()
        return False

    def _make_room(self, decoding: list[Sequence]) -> list[Sequence]:
        """A block for each sequence whose next token needs one, oldest first; the newest are preempted for it."""
        for sequence in decoding:
            while sequence in self.running and sequence.kv_length >= len(sequence.blocks) * self.block_size:
                got = self.table.allocate(1)
                if got is not None:
                    sequence.blocks += got
                elif self._saved:
                    self._drop_saved()
                else:
                    self.preemptions += 1
                    self.requeue(max(self.running, key=lambda one: one.arrival))
        return [one for one in decoding if one in self.running]

    def _caught_up(self, sequence: Sequence, logits: Any) -> None:
        """All tokens are computed: siblings and later requests may share them."""
        self._unlead(sequence)
        if sequence.kv_pure:
            self.table.remember(sequence.ids, sequence.blocks)
            if sequence.count == 0:
                self.table.remember_prompt(prompt_key(sequence.ids), sequence.blocks, logits.clone())

    def _unlead(self, sequence: Sequence) -> None:
        for key, leader in list(self._leaders.items()):
            if leader is sequence:
                del self._leaders[key]

    # --------------------------------------------------------------------------------------------- keys and values

    def release(self, sequence: Sequence) -> None:
        self._unlead(sequence)
        if sequence.kv_pure and sequence.blocks:
            self.table.remember(sequence.ids[: sequence.kv_length], sequence.blocks)
        self.table.release(sequence.blocks)
        super().release(sequence)

    def save(self, sequence: Sequence) -> str | None:
        """Hold a running sequence's blocks under a handle; they go when memory is short."""
        if not sequence.blocks or sequence.kv_length < len(sequence.ids) - 1:
            return None
        self._saves += 1
        handle = f"{self.context.name}:{self._saves}"
        used = sequence.blocks[: -(-sequence.kv_length // self.block_size)]
        self.table.hold(used)
        self._saved[handle] = (used, sequence.ids[: sequence.kv_length])
        return handle

    def _restore(self, sequence: Sequence, blocks: list[int], ids: list[int]) -> bool:
        """Saved blocks into a sequence; False when they hold other tokens or there is no room beside them."""
        own = None
        if sequence.ids[: len(ids)] == ids and len(ids) == len(sequence.ids) - 1:
            own = self.table.allocate(-(-len(sequence.ids) // self.block_size) - len(blocks))
        if own is None:
            self.table.release(blocks)
            return False
        sequence.blocks, sequence.kv_length = blocks + own, len(ids)
        # Older weights may have made them.
        sequence.kv_pure, sequence.started = False, True
        return True

    def _drop_saved(self) -> None:
        for blocks, _ in self._saved.values():
            self.table.release(blocks)
        self._saved.clear()

    def weights_changed(self, recompute: bool) -> None:
        for sequence in list(self.running):
            unfinished = sequence.kv_length < len(sequence.ids) - 1
            sequence.kv_pure = False
            if recompute or unfinished:
                self.requeue(sequence)
        if recompute:
            self._drop_saved()
        self.table.clear()

    def drop_cache(self) -> None:
        self._drop_saved()
        self.table.clear()
        self.store.drop()

    def kv_tokens(self) -> tuple[int, int]:
        held = {block for one in list(self.running) for block in one.blocks}
        held.update(block for blocks, _ in list(self._saved.values()) for block in blocks)
        return len(held) * self.block_size, self.table.total * self.block_size
