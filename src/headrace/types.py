"""The facts that cross planes: tasks, generations, samples, groups, batches, tickets and events.

Everything here is frozen and slotted; arrays are numpy and are never written to after construction.
`T` counts the tokens of one sequence (prompt included unless said otherwise), `N` environments side by side,
`B` rows of a batch.

A *version* is the number of taken batches that a policy has been fully trained on. A prompt token, a tool token and
any token that the framework appended carry `policy_version == NO_VERSION` and `loss_mask == 0`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypeVar

import numpy as np

NO_VERSION = -1
"""The policy version of a token that no policy sampled."""

MAIN_POLICY = "main"

FinishReason = Literal["stop", "length", "abort", "tool"]
Scope = Literal["full", "adapter", "changed"]

Array = np.ndarray

T = TypeVar("T")


def travels(cls: type[T]) -> type[T]:
    """Pickle a slotted frozen dataclass of two fields or more as a plain tuple, and each `Array` in it as type, shape and
    bytes. The standard ways of dataclasses and small arrays cost more than all else about a message between processes."""
    names = cls.__slots__  # type: ignore[attr-defined]
    values = attrgetter(*names)
    arrays = tuple(i for i, name in enumerate(names) if str(cls.__annotations__.get(name)).startswith("Array"))

    def __reduce__(self: Any) -> tuple[Any, ...]:
        state = [*values(self)]
        for i in arrays:
            if isinstance(array := state[i], np.ndarray):
                state[i] = (array.dtype.str, array.shape, array.tobytes())
        return _arrive, (cls, *state)

    cls.__reduce__ = __reduce__  # type: ignore[method-assign,assignment]
    _ARRIVALS[cls] = (tuple(getattr(cls, name).__set__ for name in names), arrays)
    return cls


_ARRIVALS: dict[type, tuple[tuple[Any, ...], tuple[int, ...]]] = {}
"""Class -> setters of its slots, and which of them hold arrays."""


def _arrive(cls: type, *state: Any) -> Any:
    """What `travels` packed."""
    made, values = object.__new__(cls), list(state)
    setters, arrays = _ARRIVALS[cls]
    for i in arrays:
        if isinstance(values[i], tuple) and isinstance(values[i][-1], bytes):
            dtype, shape, data = values[i]
            values[i] = np.ndarray(shape, dtype, data).copy()
    for assign, value in zip(setters, values, strict=True):
        assign(made, value)
    return made


# --------------------------------------------------------------------------------------------- tasks and sampling


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to attempt. `payload` is opaque: it belongs to the environment that resets on it.

    For a single-turn language task the payload is ``{"prompt": str | list[message], **columns}``.
    """

    task_id: str
    source: str
    payload: dict[str, Any]


LogitShape = tuple[float, tuple[tuple[int, float], ...]]
"""What changes single logits before the temperature: a repetition penalty, and (token id, bias) pairs."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. `max_tokens` is one budget over all resumptions of a generation.

    `temperature` 0 is greedy (log-probability of the arg max under temperature 1 is reported as 0: it was certain).
    `seed` with a token's position decides its random number, so a generation does not depend on its neighbours.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings that end the generation wherever they appear in the decoded completion, across token borders."""
    seed: int | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    """Divides positive logits of ids that stand in prompt or answer, multiplies negative ones; 1 leaves them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only ids that may come; empty: all. End tokens must be among them to come."""
    record_sampling_mask: bool = False
    record_expert_routing: bool = False

    @property
    def logit_shape(self) -> LogitShape:
        return self.repetition_penalty, self.logit_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMask:
    """The support each sampled token was drawn from, ragged.

    token_ids: [K] kept ids of all positions, one after another
    offsets: [T+1] position t kept ``token_ids[offsets[t]:offsets[t + 1]]``; an empty span kept the whole vocabulary
    """

    token_ids: Array
    offsets: Array


# ------------------------------------------------------------------------------------------------ engine requests


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Which try at which member of which lease this is; a reply whose key nobody waits for is counted and ignored."""

    lease_id: str
    member: int = 0
    turn: int = 0
    attempt: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.lease_id}/{self.member}.{self.turn}#{self.attempt}@{self.incarnation}"


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sample wanted from a text engine.

    prompt_ids: [P] the prompt's tokens
    seed: in place of the sampling's, which all requests of a run have in common: so it travels once in a message
    prefix: what an earlier, interrupted try of the same generation already sampled; it counts towards `max_tokens`
    group_id: siblings share it, so that the engine computes their prompt once
    keep_kv: save its keys and values whenever it is aborted, by a weight swap too, as `abort(keep_kv=True)` does
    kv_handle: names keys and values that an engine saved; gone handles fall back to `prefix`
    """

    key: RequestKey
    group_id: str
    prompt_ids: Array
    sampling: SamplingParams
    seed: int | None = None
    prefix: Generation | None = None
    keep_kv: bool = False
    kv_handle: str | None = None
    policy: str = MAIN_POLICY

    @property
    def request_id(self) -> str:
        return str(self.key)

    @property
    def drawn_by(self) -> int | None:
        """The seed that counts."""
        return self.sampling.seed if self.seed is None else self.seed


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled for one request, a resumed prefix included. `T` counts sampled tokens only.

    token_ids: [T] sampled ids, a sampled end token included
    logprobs: [T] log-probability under the distribution really sampled from (after temperature and truncation)
    policy_versions: [T] stamped by the engine as it sampled each token
    finish_reason: stop (an end token or stop string), length (max_tokens or context), abort, tool
    matched_stop: the stop token id or stop string that ended it
    expert_routing: [T, layers, top_k] expert ids in the smallest integer type that fits: those of the forward pass that
        gave token t's logits, of layers that have experts
    prompt_routing: [P - 1, layers, top_k] those of the prompt's tokens before its last, with the first of them
    """

    token_ids: Array
    logprobs: Array
    policy_versions: Array
    finish_reason: FinishReason
    sampling: SamplingParams
    matched_stop: int | str | None = None
    sampling_mask: SamplingMask | None = None
    expert_routing: Array | None = None
    prompt_routing: Array | None = None
    kv_handle: str | None = None


# ------------------------------------------------------------------------------------------------ samples and units


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One token sequence to train on: prompt and completion, or all turns of a conversation.

    token_ids: [T]
    loss_mask: [T] 1 where a policy sampled the token, else 0
    behavior_logprobs: [T] as sampled; meaningless (any value) where loss_mask is 0
    policy_versions: [T] NO_VERSION where loss_mask is 0
    expert_routing: [L - 1, layers, top_k] what the sampler's routers chose for each token up to the last sampled one, number
        L, which was never fed in
    """

    sample_id: str
    token_ids: Array
    loss_mask: Array
    behavior_logprobs: Array
    policy_versions: Array
    sampling: SamplingParams
    finish_reason: FinishReason
    agent: str = "agent"
    policy: str = MAIN_POLICY
    sampling_mask: SamplingMask | None = None
    expert_routing: Array | None = None

    @property
    def oldest_version(self) -> int:
        """The version of the oldest sampled token, NO_VERSION when nothing was sampled."""
        return _oldest([self])

    @property
    def completion_length(self) -> int:
        """Tokens that a policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = [self.token_ids, self.loss_mask, self.behavior_logprobs, self.policy_versions, self.expert_routing]
        if self.sampling_mask is not None:
            arrays += [self.sampling_mask.token_ids, self.sampling_mask.offsets]
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """`T` steps of `N` environments, time first.

    Observations are named leaves: a space that is no Dict or Tuple has one, "obs"; nested ones are joined by "/".

    observations: leaves [T+1, N, ...]; row t was acted on, the last one is the bootstrap
    actions: [T, N, ...] as sampled (before clipping to bounds)
    rewards, terminated, truncated: [T, N]; never both flags at once
    valid: [T, N] False for a reset row, whose action was ignored
    behavior_logprobs: [T, N] of the sampled action
    policy_versions: [T, N]
    ended: [K, 2] (t, n) of steps after which the environment was reset at once, so that row t+1 is a reset observation
    final_observations: leaves [K, ...] the true last observation of those episodes
    episode_returns, episode_lengths: [E] of the episodes that ended in these steps, wherever they began
    initial_state: recurrent state before step 0, leaves [N, ...]
    """

    sample_id: str
    observations: dict[str, Array]
    actions: Array
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    behavior_logprobs: Array
    policy_versions: Array
    ended: Array = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    final_observations: dict[str, Array] = field(default_factory=dict)
    episode_returns: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    episode_lengths: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    initial_state: dict[str, Array] | None = None
    policy: str = MAIN_POLICY
    group_id: str = ""

    @property
    def unit_id(self) -> str:
        return self.sample_id

    @property
    def size(self) -> int:
        """Valid steps."""
        return int(self.valid.sum())

    @property
    def oldest_version(self) -> int:
        sampled = self.policy_versions[self.valid.astype(bool)]
        return int(sampled.min()) if sampled.size else NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Whole episodes that a control policy played to be judged, not trained on.

    returns, lengths: [E]; policy_versions: [E] under which each one ended
    """

    returns: Array
    lengths: Array
    policy_versions: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """All samples (agents, segments) of one attempt at a task. Kept or dropped whole."""

    episode_id: str
    samples: tuple[TokenSample, ...]

    @property
    def oldest_version(self) -> int:
        return _oldest(self.samples)

    @property
    def completion_length(self) -> int:
        return sum(sample.completion_length for sample in self.samples)


def _oldest(samples: Iterable[TokenSample]) -> int:
    """The version of the oldest sampled token, NO_VERSION when nothing was sampled: one pass over all of them."""
    versions = [sample.policy_versions for sample in samples]
    if not versions:
        return NO_VERSION
    flat = np.concatenate(versions)
    sampled = flat[flat != NO_VERSION]
    return int(sampled.min()) if sampled.size else NO_VERSION


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward plane says of one episode. `reward` None excludes the episode from its group's baseline.

    per_token: [T] over the first sample's tokens, a credit that is added where it stands
    teacher_logprobs: [T]
    parts: each named component before weighting
    """

    reward: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    per_token: Array | None = None
    teacher_logprobs: Array | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one task, scored: the unit that the buffer moves for language tasks.

    `expected_size` is what was asked for; `episodes` holds what completed, `scores` one score for each.
    """

    group_id: str
    task: Task
    expected_size: int
    episodes: tuple[Episode, ...]
    scores: tuple[Score, ...]

    @property
    def unit_id(self) -> str:
        return self.group_id

    @property
    def size(self) -> int:
        return len(self.episodes)

    @property
    def oldest_version(self) -> int:
        return _oldest(sample for episode in self.episodes for sample in episode.samples)


Unit = Group | Trajectory


# --------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """What one optimiser step is normalised by: totals over *all* its micro-batches, never over one of them.

    A micro-batch's loss is a sum divided by these, so every split gives the same gradient.
    """

    tokens: int
    """Targets whose loss counts (after masking whole rows)."""
    sequences: int
    """Samples with at least one such target."""
    groups: int
    max_length: int
    """The constant L of constant-length normalising (Dr.GRPO): the configured max_tokens."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """A packed micro-batch without padding, in which samples may share a prefix.

    Inputs form *segments*; a token attends to the earlier tokens of its own segment and to all of its segment's
    ancestors. A prompt that G siblings share is one segment with G children. Targets are listed apart: target m is
    predicted by the logits of input row `target_rows[m]`, so the last token of a sequence is a target, never an input.

    token_ids, position_ids, segment_ids: [N] inputs; segments are contiguous, a parent stands before its children
    segment_parents: [S] index of the parent segment, -1 for a root
    target_ids, target_rows, target_samples: [M] only tokens with loss_mask 1 are targets
    target_positions: [M] index of the target among its sample's own targets, 0 first
    target_versions: [M] the policy version that sampled it; target_lags: [M] trained batches since then, when needed
    behavior_logprobs, advantages: [M]
    sample_weights: [B] 0 for a sample that is carried for metrics but masked from the loss (e.g. truncated), else 1
    sample_groups: [B] index of the sample's group within the optimiser step
    temperatures: [B] of the sampling, since log-probabilities are those of the sampled distribution
    logit_shapes: [B] repetition penalty and biases of the sampling; None when no sample has any
    reference_logprobs, proximal_logprobs, teacher_logprobs, values: [M], filled by `TrainBackend.annotate`
    sampling_mask: the support of each target (M positions), when it was recorded
    expert_routing: [N, layers, top_k] what the sampler's routers chose for input n, -1 where it was not recorded
    """

    token_ids: Array
    position_ids: Array
    segment_ids: Array
    segment_parents: Array
    target_ids: Array
    target_rows: Array
    target_samples: Array
    target_positions: Array
    target_versions: Array
    behavior_logprobs: Array
    advantages: Array
    sample_ids: tuple[str, ...]
    sample_weights: Array
    sample_groups: Array
    temperatures: Array
    counts: BatchCounts
    logit_shapes: tuple[LogitShape, ...] | None = None
    reference_logprobs: Array | None = None
    proximal_logprobs: Array | None = None
    teacher_logprobs: Array | None = None
    values: Array | None = None
    sampling_mask: SamplingMask | None = None
    expert_routing: Array | None = None
    target_lags: Array | None = None


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Trajectories side by side, time first: observation leaves [T+1, B, ...], the rest [T, B].

    discounts: gamma, and 0 where the episode terminated
    cut: the path ends after this step by a time limit; it bootstraps from the value of the true last observation
    resets: [T, B] row t is the first observation of an episode: recurrent state is zero before it
    ended: [K, 2] (t, b) of cut steps whose last observation is not row t+1 but `final_observations` [K, ...]
    initial_state: leaves [B, ...]
    values, advantages, targets: [T, B] filled by `TrainBackend.annotate`
    """

    observations: dict[str, Array]
    actions: Array
    rewards: Array
    discounts: Array
    cut: Array
    valid: Array
    resets: Array
    behavior_logprobs: Array
    policy_versions: Array
    ended: Array
    final_observations: dict[str, Array]
    initial_state: dict[str, Array] | None = None
    values: Array | None = None
    advantages: Array | None = None
    targets: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """Steps drawn from a replay, each with up to n - 1 that followed it in its episode.

    observations, actions: [B, ...] of the first step; observations are named leaves
    rewards: [B, n], 0 after the last step that counts
    steps: [B] how many count, 1 to n: fewer before an end, a cut, or the end of what was recorded
    terminated: [B] the last of them ended the episode
    next_observations: [B, ...] after the last of them, the true final observation where the episode was cut there
    weights: [B] of importance, at most 1
    serials: [B] names the first steps, to give their errors back by
    policy_versions: [B] that sampled the first steps
    """

    observations: dict[str, Array]
    actions: Array
    rewards: Array
    steps: Array
    terminated: Array
    next_observations: dict[str, Array]
    weights: Array
    serials: Array
    policy_versions: Array


@travels
@dataclass(frozen=True, slots=True)
class Stat:
    """A mean that can be merged over micro-batches and ranks: total, weight and the largest single value."""

    total: float
    weight: float = 1.0
    maximum: float = float("-inf")

    @property
    def mean(self) -> float:
        """total / weight, and 0 when nothing was counted."""
        return self.total / self.weight if self.weight else 0.0

    def __add__(self, other: Stat) -> Stat:
        return Stat(self.total + other.total, self.weight + other.weight, max(self.maximum, other.maximum))


Metrics = dict[str, Stat]


def merge_metrics(parts: list[Metrics]) -> Metrics:
    """Sum the statistics of several micro-batches name by name, in order of first appearance."""
    merged: Metrics = {}
    for part in parts:
        for name, stat in part.items():
            merged[name] = merged[name] + stat if name in merged else stat
    return merged


# ------------------------------------------------------------------------------------------- weights and the record


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTicket:
    """Says where a version's bytes are; never holds tensors.

    locator: meaning belongs to the channel (a shared-memory segment and slot, a folder, an address)
    checksum: of the published bytes in the order published; a receiver that computes another one refuses the ticket
    """

    policy: str
    version: int
    scope: Scope
    locator: str
    checksum: str
    bytes: int = 0


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine says of itself.

    progress: ids of all requests that it has, running and waiting, to the tokens they have sampled
    generated_tokens, shared_tokens, prompt_tokens, cached_prompt_tokens, preemptions, recomputed_tokens, swaps, prefill_s,
    decode_s: since it was built; shared are sampled tokens that were fed in with a sibling's, recomputed those whose keys and
    values had been there and were given up
    """

    version: int = NO_VERSION
    staged_version: int = NO_VERSION
    running: int = 0
    waiting: int = 0
    paused: bool = False
    progress: dict[str, int] = field(default_factory=dict)
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    generated_tokens: int = 0
    shared_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swaps: int = 0
    standstill_s: float = 0.0
    """Longest time between two forward passes caused by the last swap."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    weight_error: float = 0.0
    """Largest relative error (root mean square) of a layer's weights as they are computed with, against those published."""


@travels
@dataclass(frozen=True, slots=True)
class Event:
    """Something that a part did, for the timeline: it began at `time_ns` and lasted `duration_ns` (0: a point).

    Nanoseconds of the clock that all local processes share.
    """

    time_ns: int
    source: str
    kind: str
    subject_id: str = ""
    version: int = NO_VERSION
    duration_ns: int = 0


BUSY_KINDS: dict[str, tuple[str, ...]] = {
    "engine": ("generate", "prepare", "swap"),
    "trainer": ("annotate", "forward_backward", "optimizer_step", "publish", "save"),
    "reward": ("score",),
}
"""Event kinds, by the first part of the source's name ("engine-0" is an engine), during which that part works.

An engine joins forward passes that follow one another into one `generate` event of at most 0.25 s. The controller
records waits ("wait_batch": the trainer has no batch; "wait_room": admission waits for a lease; "wait_sync": the trainer
waits for the previous weight sync; "gate": dispatch is held by a sync) and "sync" with durations, and points: "admitted", "put",
"taken", "trained", "dropped" (subject ``lease:reason``), "recycled", "live" (version), "fenced", "joined".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """A picture of the run at one moment, for the live display and the watchdog."""

    elapsed_s: float
    step: int
    total_steps: int
    version: int
    live_version: int
    reward: float | None = None
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    names: tuple[str, str, str] = ("samples", "tokens", "groups")
    """What is counted: attempts, their parts, units."""
    running: int = 0
    ready: int = 0
    held: int = 0
    room: int = 0
    lag_mean: float = 0.0
    lag_max: int = 0
    syncs: int = 0
    sync_s: float = 0.0
    standstill_s: float = 0.0
    trained_units: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    """Part -> what it is doing or waiting for, in words."""
    sample: str = ""
    """A recent completion, readable."""
