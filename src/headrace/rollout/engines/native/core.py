"""Turns waiting requests into packed forward passes over shared key-value blocks: admission, batching, preemption."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.protocols import RunningPolicy, WorkerContext
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.core import Core
from headrace.rollout.engines.models import ModelFacts
from headrace.rollout.engines.native.adapters import AdaptedWeights, base_of, newest_first, older_rows, read_adapter
from headrace.rollout.engines.native.attention import KeyValues, Pass
from headrace.rollout.engines.native.batches import FIXED_PREFILL, Batcher, Piece
from headrace.rollout.engines.native.blocks import NO_MATCH, BlockTable, Computing
from headrace.rollout.engines.native.generic import ROUTES
from headrace.rollout.engines.native.saves import Saved, Saves
from headrace.rollout.engines.native.siblings import Histories, Places, distinct
from headrace.rollout.engines.sampling import Draw, Drawn
from headrace.rollout.engines.sequences import Sequence
from headrace.types import NO_VERSION

_DEFAULT_KV_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class End:
    """What the forward pass said after the last token of a prompt: logits [V], experts [layers, top_k]. Who goes on from
    here has this `history`."""

    logits: torch.Tensor
    routes: np.ndarray | None
    history: int


class NativeCore(Core):
    """Continuous batching: each pass takes one token of every sequence that decodes and a piece of those that catch up."""

    adapts = True

    def __init__(
        self,
        context: WorkerContext,
        facts: ModelFacts,
        weights: Any,
        builder: Any,
        channel: Any,
        kv_on_swap: str,
        engine: EngineConfig,
        dtype: str,
        load: Callable[[], Any],
    ) -> None:
        """load: the weights that it was built on, anew"""
        super().__init__(context, facts, weights, channel, kv_on_swap, engine.max_running)
        self._builder, self._load = builder, load
        self.finish_on_swap = kv_on_swap == "finish"
        self.max_adapters = engine.max_adapters
        self.has_experts = bool(getattr(weights, "routers", None))
        self.block_size = engine.block_size
        tokens = engine.kv_tokens or min(engine.max_running * facts.context_length, _DEFAULT_KV_TOKENS)
        blocks = max(1, -(-tokens // self.block_size) if not engine.kv_tokens else tokens // self.block_size)
        self.table = BlockTable(blocks, self.block_size)
        self.store = KeyValues(blocks * self.block_size + 1)
        self.batcher = Batcher(self.block_size, spare=blocks * self.block_size)
        self.histories = Histories()
        self.fixed = engine.deterministic
        self.prefill_tokens = engine.prefill_tokens
        self.save_preempted = engine.preemption == "save"
        self.places = Places(self.table, self.store)
        room = engine.kv_saved_mb * 1_000_000
        self.saves = Saves(context.name, f"{facts.mark}/{dtype}", room, engine.kv_folder)

    def longest(self) -> int:
        return min(self.facts.context_length, self.table.total * self.block_size)

    def build(self, tensors: Any, spare: Any) -> Any:
        # Adapters share the base's memory: it is nobody's to write to.
        shared = isinstance(spare, AdaptedWeights) or isinstance(self.weights, AdaptedWeights)
        with torch.inference_mode():
            return self._builder(tensors, None if shared else spare)

    @torch.inference_mode()
    def adapt(self, tensors: Any) -> AdaptedWeights:
        live = self.weights
        if isinstance(live, AdaptedWeights):
            base = live.base
        else:
            base = base_of(live if live is not None and self.version == NO_VERSION else self._load())
        return AdaptedWeights(base, read_adapter(tensors, base))

    def named(self) -> Any:
        return self.weights.named()

    # ---------------------------------------------------------------------------------------------------- a pass

    @torch.inference_mode()
    def advance(self) -> None:
        start = time.perf_counter()
        self._admit()
        behind = [one for one in self.running if self._is_behind(one)]
        late = set(behind)
        decoding = self._make_room([one for one in self.running if one not in late])
        pieces, budget = [], self.prefill_tokens
        for sequence in behind:
            if budget and sequence in self.running:
                pieces.append((sequence, min(budget, self._piece(sequence))))
                budget -= pieces[-1][1]
        if self.fixed:
            for piece in pieces:
                self._run_pass([piece], [])
        decoded = 0
        if decoding or (pieces and not self.fixed):
            decoded = self._run_pass([] if self.fixed else pieces, decoding)
        took, rows = time.perf_counter() - start, sum(count for _, count in pieces)
        share = rows / max(rows + decoded, 1)
        self.prefill_s += took * share
        self.decode_s += took * (1 - share)

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether more than its last token is to be computed, or nothing was yet. Fixed shapes compute again what was
        sampled as it was sampled, a token a pass."""
        if self.fixed:
            return sequence.kv_length < sequence.prompt_length
        return sequence.kv_length < len(sequence.ids) - 1 or not sequence.started

    def _piece(self, sequence: Sequence) -> int:
        """Tokens of its next piece. Those of fixed shapes end where a whole number of them does."""
        if self.fixed:
            left = sequence.prompt_length - sequence.kv_length
            return min(left, FIXED_PREFILL - sequence.kv_length % FIXED_PREFILL)
        return len(sequence.ids) - sequence.kv_length

    def _run_pass(self, pieces: list[Piece], decoding: list[Sequence]) -> int:
        """One forward pass; every sequence whose last token was in it draws its next one. How many rows decoded."""
        mixed = any(one.under is not None for one in decoding)
        if mixed:
            decoding = sorted(decoding, key=newest_first)
        for sequence, _ in pieces:
            sequence.started = True
        firsts, places = (decoding, list(range(len(decoding)))) if self.fixed else distinct(decoding)
        batch = self._batch(pieces, firsts)
        if mixed:
            batch.older = older_rows(firsts, batch.decode_start)
        logits = self.weights.forward(batch, self.store)
        self._copy_to_twins(decoding, firsts, places)
        self._take(pieces, decoding, places, batch, logits)
        return len(firsts)

    def _copy_to_twins(self, decoding: list[Sequence], firsts: list[Sequence], places: list[int]) -> None:
        """The new keys and values of a row to all whose token it was: from here on they may part."""
        if len(firsts) == len(decoding):
            return
        self.shared_tokens += len(decoding) - len(firsts)
        written = [self.batcher.next_slot(one) for one in firsts]
        own = {self.batcher.next_slot(one): written[place] for one, place in zip(decoding, places, strict=True)}
        if others := {slot: first for slot, first in own.items() if slot != first}:
            self.store.copy(torch.tensor(list(others.values())), torch.tensor(list(others)))

    def _batch(self, pieces: list[Piece], decoding: list[Sequence]) -> Pass:
        if not self.fixed:
            return self.batcher.ragged(pieces, decoding)
        return self.batcher.fixed_piece(*pieces[0]) if pieces else self.batcher.fixed_decode(decoding, self.max_running)

    def _take(
        self, pieces: list[Piece], decoding: list[Sequence], places: list[int], batch: Pass, logits: torch.Tensor
    ) -> None:
        """places: of each decoding sequence's row among the decoding rows"""
        routes = batch.routes
        drawing = []
        for sequence, count in pieces:
            sequence.kv_length += count
            caught_up = sequence.kv_length == len(sequence.ids)
            self._computed(sequence, batch, logits[len(drawing)] if caught_up else None, len(drawing))
            if caught_up:
                drawing.append(sequence)
        first = len(drawing)
        rows = list(range(first))
        for place, sequence in zip(places, decoding, strict=True):
            sequence.kv_length += 1
            sequence.started = True
            if sequence.kv_length == len(sequence.ids):
                drawing.append(sequence)
                rows.append(first + place)
        if drawing and routes is not None:
            self._note_prompt_routes(drawing, routes.dtype)
        self.histories.forget()
        if drawing:
            taken = slice(len(rows)) if rows[-1] == len(rows) - 1 else rows
            self.draw(drawing, logits[taken], routes[taken] if routes is not None else None)
            self.histories.grow(drawing)

    def _note_prompt_routes(self, sequences: list[Sequence], dtype: Any) -> None:
        """Of prompts all of whose tokens have been computed, by whomever."""
        for one in sequences:
            if one.routes is not None and one.prompt_routes is None:
                slots = self.batcher.slots(one.blocks, one.prompt_length - 1)
                one.prompt_routes = self.store.keys[ROUTES][slots].numpy().astype(dtype)

    def sample(self, logits: Any, draws: list[Draw]) -> list[Drawn | None]:
        if not self.fixed:
            return super().sample(logits, draws)
        return [super(NativeCore, self).sample(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]

    # ------------------------------------------------------------------------------------- admission and preemption

    def _admit(self) -> None:
        """First come, first served, while blocks last. Who would share what is being computed waits for it."""
        drawing: list[tuple[Sequence, Any]] = []
        computing = Computing([one for one in self.running if self._is_behind(one)])
        admitted: set[Sequence] = set()
        try:
            self._admit_while_there_is_room(computing, admitted, drawing)
        finally:  # whatever failed: a sequence is in one place, and no block waits to be copied
            self.waiting = [one for one in self.waiting if one not in admitted]
            self.running.sort(key=lambda one: one.arrival)
            self.places.copy()
        if drawing:
            routes = [end.routes for _, end in drawing]
            logits = torch.stack([end.logits for _, end in drawing])
            if self.has_experts:
                self._note_prompt_routes([one for one, _ in drawing], routes[0].dtype)
            self.draw([one for one, _ in drawing], logits, routes if self.has_experts else None)
            self.histories.grow([one for one, _ in drawing])

    def _admit_while_there_is_room(
        self, computing: Computing, admitted: set[Sequence], drawing: list[tuple[Sequence, Any]]
    ) -> None:
        """Adds to all three: who has tokens to compute, who was admitted, and whose first token can be drawn at once."""
        waited_for: set[tuple[str, int]] = set()
        mates: dict[int, Sequence] = {}
        """Admitted before, with all keys and values, by their history."""
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_running:
                break
            # Siblings have their prompt in common, so what one waits for need not be looked for again by the others.
            prompt = (sequence.request.group_id, len(sequence.ids)) if not sequence.count else None
            if prompt in waited_for or not self.admissible(sequence):
                continue
            known = sequence.ids[: sequence.prompt_length] if self.fixed else sequence.ids
            held_back = sequence.saved or sequence.request.kv_handle
            if held_back:
                self.places.copy()  # which leaves as much room as there is
            if held_back and self.table.room < -(-len(sequence.ids) // self.block_size):
                break
            saved = self._saved(sequence) if held_back else None
            sequence.under = sequence.under if saved else None
            match = NO_MATCH if saved else self.table.match(known, leave_one=len(known) == len(sequence.ids))
            if not saved and self._worth_waiting(known, match.length(self.block_size), computing):
                if prompt is not None:
                    waited_for.add(prompt)
                continue
            if match.end and (mate := mates.get(match.end.history)):
                self.places.share(sequence, mate)
            elif not self.places.give(sequence, match):
                break
            if saved:
                self._restore(sequence, saved)
            admitted.add(sequence)
            self.running.append(sequence)
            if self._is_behind(sequence):
                computing.add(sequence)
            if sequence.started:
                # The last token's were never there.
                self.recomputed_tokens += max(len(sequence.ids) - 1 - sequence.kv_length, 0)
            else:
                self.prompt_tokens += len(sequence.ids)
                self.cached_prompt_tokens += sequence.kv_length
            if sequence.kv_length == len(sequence.ids):
                sequence.started, sequence.history = True, match.end.history
                drawing.append((sequence, match.end))
                if sequence.history:
                    mates.setdefault(sequence.history, sequence)

    def _worth_waiting(self, ids: list[int], known: int, computing: Computing) -> bool:
        """Whether someone is computing a further block, or all the rest, of these very tokens."""
        if known >= len(ids):
            return False
        return computing.has(ids, min(known - known % self.block_size + self.block_size, len(ids)))

    def _make_room(self, decoding: list[Sequence]) -> list[Sequence]:
        """A place for each next token; the newest sequences are preempted for those of older ones."""
        before = self.preemptions
        self.places.extend(decoding, self._preempt_newest)
        return decoding if self.preemptions == before else [one for one in decoding if one.blocks]

    def _preempt_newest(self) -> None:
        self.preemptions += 1
        self._preempt(max(self.running, key=lambda one: one.arrival))

    def _preempt(self, sequence: Sequence) -> None:
        handle = self.save(sequence) if self.save_preempted else None
        under = sequence.under if handle else None
        self.requeue(sequence)
        sequence.saved, sequence.under = handle, under

    def _computed(self, sequence: Sequence, batch: Pass, logits: torch.Tensor | None, row: int) -> None:
        """A piece of it is there, and maybe what comes next: siblings and later requests may share both."""
        if sequence.kv_pure and not (self.fixed and sequence.kv_length > sequence.prompt_length):
            end = None
            if logits is not None and sequence.count == 0:
                sequence.history = 0 if self.fixed else self.histories.begin()
                routes = batch.routes[row] if batch.routes is not None else None
                end = End(logits.clone(), routes, sequence.history)
            self.table.remember(sequence.ids[: sequence.kv_length], sequence.blocks, end)

    # --------------------------------------------------------------------------------------------- keys and values

    def release(self, sequence: Sequence) -> None:
        if sequence.kv_pure and sequence.blocks:
            # With fixed shapes a token of a prompt is not computed as a sampled one was.
            last = min(sequence.kv_length, sequence.prompt_length) if self.fixed else sequence.kv_length
            self.table.remember(sequence.ids[:last], sequence.blocks)
        self.table.release(sequence.blocks)
        if sequence.saved is not None:
            self.saves.drop(sequence.saved)
            sequence.saved = None
        super().release(sequence)

    def save(self, sequence: Sequence) -> str | None:
        """A copy outside the store, of a sequence that has all but its last token's or waits with what was saved before."""
        if sequence.saved is not None or not sequence.blocks or sequence.kv_length < len(sequence.ids) - 1:
            handle, sequence.saved = sequence.saved, None
            return handle
        slots = self.batcher.slots(sequence.blocks, sequence.kv_length)
        ids = sequence.ids[: sequence.kv_length]
        return self.saves.put(Saved(ids, self.version, sequence.kv_pure, self.store.read(slots)))

    def _saved(self, sequence: Sequence) -> Saved | None:
        """What was saved of a sequence that is to go on, if it is there and may still be used."""
        saved = self.saves.take(sequence.saved or sequence.request.kv_handle, sequence.ids[:-1])
        sequence.saved = None
        if saved is None or (self.recompute_on_swap and saved.version != self.version):
            return None
        return saved

    def _restore(self, sequence: Sequence, saved: Saved) -> None:
        """Saved keys and values into the blocks of a sequence, which then decodes."""
        slots = self.batcher.slots(sequence.blocks, len(saved.ids))
        for layer, (keys, values) in saved.layers.items():
            self.store.write(layer, slots, keys, values)
        sequence.kv_length = len(saved.ids)
        sequence.kv_pure, sequence.started = saved.pure and saved.version == self.version, True

    def swap(self, version: int, running: RunningPolicy) -> None:
        before = (self.version, self.weights)
        super().swap(version, running)
        if self.finish_on_swap and running == "go_on" and self.version != before[0]:
            self._finish_on(before)

    def _finish_on(self, before: tuple[int, Any]) -> None:
        """What has keys and values stays with the adapter that made them, unless that is too old by now."""
        having = [*self.running, *(one for one in self.waiting if one.saved is not None)]
        if not isinstance(self.weights, AdaptedWeights):
            # Another base: no pass has rows of both.
            for sequence in having:
                sequence.under = None
        elif isinstance(before[1], AdaptedWeights):
            for sequence in having:
                sequence.under = sequence.under or before
        versions = sorted({one.under[0] for one in having if one.under is not None})
        oldest = versions[: max(0, len(versions) - self.max_adapters + 1)]
        for sequence in having:
            if sequence.under is not None and sequence.under[0] in oldest:
                sequence.under = None

    def weights_changed(self, recompute: bool) -> None:
        for sequence in list(self.running):
            unfinished = sequence.kv_length < len(sequence.ids) - 1
            sequence.kv_pure = False
            if recompute or unfinished:
                self.requeue(sequence)
        self.table.clear()

    def drop_cache(self) -> None:
        self.table.clear()
        self.store.drop()

    def kv_tokens(self) -> tuple[int, int]:
        held = {block for one in list(self.running) for block in one.blocks}
        return len(held) * self.block_size, self.table.total * self.block_size
