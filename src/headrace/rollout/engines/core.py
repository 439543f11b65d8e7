"""Turns requests and weight tickets into generations, one forward pass at a time: no threads, no asyncio.

A driver calls everything here from one thread only, between passes; `prepare_weights` alone may run beside a pass.
Engines fill in the four methods at the end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headrace.errors import PartFailed, RequestRefused, StaleTicket
from headrace.protocols import PauseMode, RunningPolicy, WorkerContext
from headrace.rollout.engines.models import weights_digest
from headrace.rollout.engines.sampling import Draw, Drawn, sample
from headrace.rollout.engines.sequences import Sequence, check_finish, next_uniforms, open_sequence
from headrace.types import NO_VERSION, EngineStats, Event, GenerateRequest, Generation, WeightTicket

if TYPE_CHECKING:
    from headrace.protocols import WeightChannel
    from headrace.rollout.engines.models import ModelFacts

_JOIN_NS = 250_000_000

Listener = Callable[[Sequence, Exception | None], None]
"""Told once, when the request has ended."""
Reporter = Callable[[Generation], None]
"""Told after each pass what was sampled since the last time."""


class Core(ABC):
    """The life of requests and weights. `weights` is whatever the engine's forward pass reads, swapped as one reference."""

    adapts = False
    """Whether it takes an adapter alone."""

    def __init__(
        self,
        context: WorkerContext,
        facts: ModelFacts,
        weights: Any,
        channel: WeightChannel | None,
        kv_on_swap: str,
        max_running: int,
    ) -> None:
        self.context, self.facts, self.channel = context, facts, channel
        self.weights = weights
        self.max_running = max_running
        self.recompute_on_swap = kv_on_swap == "recompute"
        self.has_experts = False
        self.version = NO_VERSION
        self.staged: tuple[int, Any] | None = None
        self.spare: Any = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.paused: PauseMode | None = None
        self.asleep = 0
        self._listeners: dict[str, Listener] = {}
        self._reporters: dict[str, Reporter] = {}
        self._arrivals = 0
        self._last_pass_ns = 0
        self._swap_open = False
        self._span: tuple[int, int] | None = None
        self.generated_tokens = self.shared_tokens = self.prompt_tokens = self.cached_prompt_tokens = 0
        self.preemptions = self.recomputed_tokens = self.swaps = 0
        self.standstill_s = self.prefill_s = self.decode_s = 0.0

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerateRequest, listener: Listener, reporter: Reporter | None = None) -> None:
        """Queue a request. Raises RequestRefused for one that can never be served."""
        request_id = request.request_id
        if request_id in self._listeners:
            raise RequestRefused(f"request {request_id} is already on this engine")
        sequence = open_sequence(
            request,
            request_id,
            vocab_size=self.facts.vocab_size,
            context_length=self.longest(),
            end_ids=self.facts.end_ids,
            has_tokenizer=self.facts.tokenizer is not None,
            has_experts=self.has_experts,
        )
        if sequence.finish_reason is not None:
            listener(sequence, None)
            return
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._listeners[request_id] = listener
        if reporter is not None:
            self._reporters[request_id] = reporter
        self.waiting.append(sequence)

    def abort(self, request_id: str, keep_kv: bool = False) -> Generation | None:
        """Stop a request and hand back what it has; None for an id that is not here."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request_id == request_id:
                self._hand_back(sequence, keep_kv)
                return sequence.generation()
        return None

    def cancel(self, request: GenerateRequest) -> None:
        """Abort this very request, if it is still here; another one that has taken its id is left alone."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request is request:
                self.finish(sequence, "abort")

    def finish(self, sequence: Sequence, reason: Any = None, error: Exception | None = None) -> None:
        """Take the sequence off the engine and tell whoever waits for it."""
        if reason is not None:
            sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._tell(sequence, error)

    def _tell(self, sequence: Sequence, error: Exception | None) -> None:
        self.release(sequence)
        self._reporters.pop(sequence.request_id, None)
        self._listeners.pop(sequence.request_id)(sequence, error)

    def requeue(self, sequence: Sequence) -> None:
        """Running -> waiting, before everything that arrived later; its tokens stay, its keys and values go."""
        self.running.remove(sequence)
        self.release(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda one: one.arrival)

    def fail_all(self, error: Exception) -> None:
        for sequence in (*self.running, *self.waiting):
            self.finish(sequence, "abort", error)

    # ---------------------------------------------------------------------------------------------------- passes

    @property
    def ready(self) -> bool:
        """Whether a pass would do something."""
        if self.asleep or self.weights is None or self.paused in ("keep", "abort"):
            return False
        return bool(self.running) or any(self.admissible(one) for one in self.waiting)

    def admissible(self, sequence: Sequence) -> bool:
        """While the engine runs dry (pause "wait"), only what had begun goes on."""
        return self.paused is None or (self.paused == "wait" and sequence.started)

    def step(self) -> None:
        """One forward pass (or none, when nothing can move)."""
        start = time.monotonic_ns()
        if self._swap_open:
            # Only an engine that had work stands still; one that was idle lost nothing.
            self.standstill_s = (start - self._last_pass_ns) * 1e-9
            self._swap_open = False
        self.advance()
        self._last_pass_ns = time.monotonic_ns()
        self._note_pass(start, self._last_pass_ns)
        for request_id, reporter in list(self._reporters.items()):
            sequence = next((one for one in self.running if one.request_id == request_id), None)
            if sequence is not None and sequence.count > sequence.reported:
                reporter(sequence.generation(sequence.reported))
                sequence.reported = sequence.count

    def draw(self, sequences: list[Sequence], logits: Any, routes: Any = None) -> None:
        """[R, V] logits into one more token of each of R sequences, stamped with the version that made it.

        routes: [R, layers, top_k] experts of the rows that gave the logits, for models that have them
        """
        draws = [
            Draw(one.request.sampling, uniform, one.banned(), record=one.masks is not None, seen=one.ids)
            for one, uniform in zip(sequences, next_uniforms(sequences), strict=True)
        ]
        ended: dict[Sequence, Exception | None] = {}
        for row, (sequence, drawn) in enumerate(zip(sequences, self.sample(logits, draws), strict=True)):
            if drawn is None:
                sequence.finish_reason = "abort"
                ended[sequence] = PartFailed(
                    f"request {sequence.request_id}: logits of version {self.version} are not finite, or its "
                    "sampling leaves no token"
                )
                continue
            chosen = routes[row] if routes is not None else None
            version = sequence.under[0] if sequence.under is not None else self.version
            sequence.append(drawn.token, drawn.logprob, version, drawn.kept, chosen)
            self.generated_tokens += 1
            if check_finish(sequence, self.facts.tokenizer):
                ended[sequence] = None
        if ended:  # all at once: each search of the list is as long as it
            self.running = [one for one in self.running if one not in ended]
        for sequence, error in ended.items():
            self._tell(sequence, error)

    def sample(self, logits: Any, draws: list[Draw]) -> list[Drawn | None]:
        return sample(logits, draws)

    def _note_pass(self, start: int, end: int) -> None:
        """Join passes that follow one another closely into one event."""
        if self._span is not None and (start - self._span[1] > 5_000_000 or end - self._span[0] > _JOIN_NS):
            self.flush_events()
        self._span = (start if self._span is None else self._span[0], end)

    def flush_events(self) -> None:
        """Record the forward passes that are not in the timeline yet."""
        if self._span is not None:
            self.record("generate", *self._span)
            self._span = None

    def record(self, kind: str, start_ns: int, end_ns: int, version: int | None = None) -> None:
        self.context.record(
            Event(
                time_ns=start_ns,
                source=self.context.name,
                kind=kind,
                version=self.version if version is None else version,
                duration_ns=end_ns - start_ns,
            )
        )

    # --------------------------------------------------------------------------------------------------- weights

    def wanted(self, ticket: WeightTicket) -> bool:
        """Whether a prepare of this ticket has work to do. Raises StaleTicket on a step back."""
        if ticket.scope == "adapter" and not self.adapts:
            raise PartFailed(
                "this engine runs no adapters beside a base; use the native one, or training.lora.kind = merged"
            )
        newest = max(self.version, self.staged[0] if self.staged else NO_VERSION)
        if ticket.version < newest:
            raise StaleTicket(f"version {ticket.version} is older than version {newest}, which is here already")
        if self.staged is not None and self.staged[0] == ticket.version:
            return False
        return ticket.version > self.version or self.weights is None

    def prepare_weights(self, ticket: WeightTicket) -> Any:
        """The ticket's bytes as weights beside the live ones. Runs while passes go on."""
        if self.channel is None:
            raise PartFailed("this engine was built without a weight channel, so it cannot prepare a ticket")
        start = time.monotonic_ns()
        spare, self.spare = self.spare, None
        tensors = self.channel.read(ticket)
        try:
            # At scope "changed" the channel's end gives all tensors.
            weights = self.adapt(tensors) if ticket.scope == "adapter" else self.build(tensors, spare)
        finally:
            # No view may be left when the publisher is told that it may overwrite the bytes.
            del tensors
            self.channel.release(ticket)
        self.record("prepare", start, time.monotonic_ns(), ticket.version)
        return weights

    def stage(self, version: int, weights: Any) -> None:
        """Replace what is staged; what it replaces becomes the next prepare's memory."""
        if self.staged is not None:
            self.spare = self.staged[1]
        self.staged = (version, weights)

    def swap(self, version: int, running: RunningPolicy) -> None:
        """Live <- staged, between two passes."""
        if version < self.version:
            raise StaleTicket(f"version {version} is older than version {self.version}, which is live")
        if self.staged is None or self.staged[0] != version:
            if version == self.version and self.weights is not None:
                return
            raise PartFailed(f"version {version} is not staged")
        start = time.monotonic_ns()
        if running == "abort":
            self._abort_started()
        if self.weights is not None:
            self.spare = self.weights
        self.version, self.weights = self.staged
        self.staged = None
        self.weights_changed(recompute=self.recompute_on_swap and running != "freeze")
        self.swaps += 1
        end = time.monotonic_ns()
        self.flush_events()
        self.record("swap", start, end)
        self._swap_open = bool(self.running) and self.paused is None and not self.asleep
        if not self._swap_open:
            self.standstill_s = (end - start) * 1e-9

    def _abort_started(self) -> None:
        for sequence in (*self.running, *[one for one in self.waiting if one.started]):
            self._hand_back(sequence)

    def _hand_back(self, sequence: Sequence, keep_kv: bool = False) -> None:
        if keep_kv or sequence.request.keep_kv:
            sequence.kv_handle = self.save(sequence)
        self.finish(sequence, "abort")

    # --------------------------------------------------------------------------------------------- pause and sleep

    def pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode == "abort":
            self._abort_started()

    @property
    def drained(self) -> bool:
        """Nothing that was started is unfinished."""
        return not self.running and not any(one.started for one in self.waiting)

    def resume(self) -> None:
        self.paused = None

    def sleep(self, level: int) -> None:
        """1: keys and values go, what runs will be computed again; 2: weights go too, and a commit must bring new ones."""
        if level not in (1, 2):
            raise PartFailed(f"sleep levels are 1 and 2, found {level}")
        self.asleep = max(self.asleep, level)
        for sequence in list(self.running):
            self.requeue(sequence)
        self.drop_cache()
        if level == 2:
            self.weights = self.spare = None

    def wake(self) -> None:
        self.asleep = 0

    def stats(self) -> EngineStats:
        used, total = self.kv_tokens()
        waiting = list(self.waiting)
        return EngineStats(
            version=self.version,
            staged_version=self.staged[0] if self.staged else NO_VERSION,
            running=len(self.running),
            waiting=len(waiting),
            paused=self.paused is not None or self.asleep > 0,
            progress={one.request_id: one.count for one in (*self.running, *waiting)},
            kv_tokens_used=used,
            kv_tokens_total=total,
            generated_tokens=self.generated_tokens,
            shared_tokens=self.shared_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            swaps=self.swaps,
            standstill_s=self.standstill_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            weight_error=getattr(self.weights, "error", 0.0),
        )

    def fingerprint(self) -> str:
        """Digest of the live weights, by the names and in the form in which they are published."""
        if self.weights is None:
            raise PartFailed("this engine sleeps without weights: a commit must bring new ones first")
        return weights_digest(self.named())

    # ----------------------------------------------------------------------------------------- what an engine fills in

    @abstractmethod
    def named(self) -> Iterable[tuple[str, Any]]:
        """Names and tensors of the live weights."""

    @abstractmethod
    def advance(self) -> None:
        """Admit what fits, run one pass, draw tokens."""

    @abstractmethod
    def build(self, tensors: Any, spare: Any) -> Any:
        """Named tensors into weights, in `spare`'s memory where it can."""

    def adapt(self, tensors: Any) -> Any:
        """An adapter's tensors into weights: the base that the engine was built on, and it. Asked only of one that `adapts`."""
        raise NotImplementedError

    def longest(self) -> int:
        """Most tokens of prompt and completion together."""
        return self.facts.context_length

    def release(self, sequence: Sequence) -> None:
        """Its keys and values are not needed any more."""
        sequence.blocks, sequence.kv_length, sequence.kv_pure, sequence.under = [], 0, True, None
        sequence.history = 0

    def save(self, sequence: Sequence) -> str | None:
        """Keep its keys and values under a handle, if the engine can and has them."""
        return None

    @abstractmethod
    def weights_changed(self, recompute: bool) -> None:
        """Forget keys and values that the old weights made; with `recompute` those of running sequences too."""

    @abstractmethod
    def drop_cache(self) -> None:
        """Give the memory of keys and values back."""

    def kv_tokens(self) -> tuple[int, int]:
        """Tokens whose keys and values are held, and how many there is room for."""
        return 0, 0
