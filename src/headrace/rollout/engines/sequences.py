"""Turns a request into a growing sequence of tokens, and such a sequence into the Generation that is handed back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.errors import RequestRefused
from headrace.rollout.config import sampling_problem
from headrace.types import FinishReason, GenerateRequest, Generation, SamplingMask

_MASK64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way.

    ids: prompt and sampled tokens, one list
    prompt_length: how many of them are the prompt
    limit: most sampled tokens (max_tokens, or less where the context ends)
    stop_ids: end tokens of the model and of the request
    masks: [kept ids] for each sampled token, when they are recorded
    routes: [layers, top_k] experts for each sampled token, when they are recorded
    arrival: grows with each submitted request; a larger number is preempted first
    """

    request: GenerateRequest
    request_id: str
    ids: list[int]
    prompt_length: int
    limit: int
    stop_ids: tuple[int, ...]
    seed: int
    arrival: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    masks: list[np.ndarray] | None = None
    routes: list[np.ndarray] | None = None
    prompt_routes: np.ndarray | None = None
    """[P - 1, layers, top_k] those of the prompt before its last token, once they are known."""
    started: bool = False
    """A forward pass worked for it in this try."""
    reported: int = 0
    """Sampled tokens that its stream has yielded."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    kv_handle: str | None = None

    # Keys and values, for engines that keep them.
    blocks: list[int] = field(default_factory=list)
    kv_length: int = 0
    kv_pure: bool = True
    """All its keys and values were made by the live weights."""
    history: int = 0
    """Of all that have the same, tokens, keys and values are the same; 0: maybe nobody's but its own."""
    saved: str | None = None
    """Handle of its keys and values while it waits for room."""
    under: tuple[int, Any] | None = None
    """Version and weights that it finishes on; None: the live ones."""

    @property
    def count(self) -> int:
        """Sampled tokens, a resumed prefix included."""
        return len(self.ids) - self.prompt_length

    def append(
        self, token: int, logprob: float, version: int, mask: np.ndarray | None, routes: np.ndarray | None
    ) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.masks is not None:
            self.masks.append(mask)
        if self.routes is not None:
            self.routes.append(routes)

    def banned(self) -> tuple[int, ...]:
        """Ids that may not be sampled next: end tokens while `min_tokens` is not reached."""
        return self.stop_ids if self.count < self.request.sampling.min_tokens else ()

    def generation(self, start: int = 0) -> Generation:
        """[T - start] what was sampled from index `start` on. A generation that still runs reads as an aborted one."""
        sampled = self.ids[self.prompt_length + start :]
        return Generation(
            token_ids=np.array(sampled, dtype=np.int64),
            logprobs=np.array(self.logprobs[start:], dtype=np.float32),
            policy_versions=np.array(self.versions[start:], dtype=np.int64),
            finish_reason=self.finish_reason or "abort",
            sampling=self.request.sampling,
            matched_stop=self.matched_stop,
            sampling_mask=join_masks(self.masks[start:]) if self.masks is not None else None,
            expert_routing=np.stack(self.routes[start:]) if self.routes and len(self.routes) > start else None,
            prompt_routing=self.prompt_routes if self.finish_reason else None,
            kv_handle=self.kv_handle,
        )


def next_uniforms(sequences: list[Sequence]) -> list[float]:
    """The random number of each one's next token: a function of its seed and the token's position alone."""
    seeds = [one.seed & _MASK64 for one in sequences]
    return counter_uniforms(seeds, [len(one.ids) for one in sequences]).tolist()


def counter_uniforms(seeds: Any, positions: Any) -> np.ndarray:
    """[N] numbers in [0, 1), each of which depends on its seed (below 2**64) and its position only. The seed is mixed before
    the position is added, so no two seeds walk the same numbers."""
    starts = _mix(np.asarray(seeds, np.uint64) + _GOLDEN)
    mixed = _mix(starts + (np.asarray(positions, np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def join_masks(masks: list[np.ndarray]) -> SamplingMask:
    """[T] arrays of kept ids into one ragged record."""
    offsets = np.zeros(len(masks) + 1, dtype=np.int64)
    np.cumsum([len(mask) for mask in masks], out=offsets[1:])
    kept = np.concatenate(masks) if masks else np.zeros(0, dtype=np.int32)
    return SamplingMask(token_ids=kept.astype(np.int32), offsets=offsets)


def split_masks(mask: SamplingMask) -> list[np.ndarray]:
    return [mask.token_ids[a:b] for a, b in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]


def join_generations(pieces: list[Generation]) -> Generation:
    """What a stream yielded, one after another, as one; the last piece says how it ended."""
    last = pieces[-1]
    masks = [piece.sampling_mask for piece in pieces]
    routes = [piece.expert_routing for piece in pieces]
    return replace(
        last,
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        policy_versions=np.concatenate([piece.policy_versions for piece in pieces]),
        sampling_mask=join_masks([row for mask in masks for row in split_masks(mask)]) if all(masks) else None,  # type: ignore[arg-type]
        expert_routing=np.concatenate(routes) if all(route is not None for route in routes) else None,  # type: ignore[arg-type]
    )


def truncates(request: GenerateRequest) -> bool:
    """Whether some of its tokens are drawn from less than the whole vocabulary."""
    s = request.sampling
    truncated = s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 or s.temperature == 0.0
    return truncated or s.min_tokens > 0 or bool(s.allowed_token_ids)


def open_sequence(
    request: GenerateRequest,
    request_id: str,
    *,
    vocab_size: int,
    context_length: int,
    end_ids: tuple[int, ...],
    has_tokenizer: bool,
    has_experts: bool,
) -> Sequence:
    """A sequence at its start, or at the end of its resumed prefix. Raises RequestRefused for what can never be served."""
    sampling, name = request.sampling, f"request {request_id}"
    prompt = _ids_of(request.prompt_ids, f"{name}: the prompt", vocab_size)
    if not prompt:
        raise RequestRefused(f"{name}: the prompt has no tokens; a prompt needs at least one")
    if len(prompt) >= context_length:
        raise RequestRefused(
            f"{name}: a prompt of {len(prompt)} tokens leaves no room in a context of {context_length} tokens; "
            "shorten it, or raise rollout.engine.context_length or rollout.engine.kv_tokens"
        )
    if sampling.stop and not has_tokenizer:
        raise RequestRefused(f"{name}: stop strings need a tokenizer, and the model folder has none")
    stop_ids = tuple(dict.fromkeys((*end_ids, *sampling.stop_token_ids)))
    if problem := sampling_problem(sampling, vocab_size, stop_ids):
        raise RequestRefused(f"{name}: {problem}")

    sequence = Sequence(
        request=request,
        request_id=request_id,
        ids=prompt,
        prompt_length=len(prompt),
        limit=min(sampling.max_tokens, context_length - len(prompt)),
        stop_ids=stop_ids,
        seed=_seed_of(request),
        masks=[] if sampling.record_sampling_mask and truncates(request) else None,
        routes=[] if sampling.record_expert_routing and has_experts else None,
    )
    if request.prefix is not None:
        _resume(sequence, request.prefix, vocab_size)
    return sequence


def _ids_of(given: Any, what: str, vocab_size: int) -> list[int]:
    array = np.asarray(given).reshape(-1)
    ids: list[int] = array.tolist()
    if ids and array.dtype.kind not in "iu":
        raise RequestRefused(f"{what}: token ids are whole numbers, found {array.dtype} {ids[0]}")
    # Of Python's own numbers, which are wanted anyway: numpy's search costs more than that of a hundred of them.
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise RequestRefused(f"{what}: token ids must lie in [0, {vocab_size}), found {min(ids)} to {max(ids)}")
    return ids


def _seed_of(request: GenerateRequest) -> int:
    """The request's seed; without one, a number that stays the same when the same member is tried again."""
    if request.drawn_by is not None:
        return request.drawn_by
    key = request.key
    digest = hashlib.blake2b(f"{key.lease_id}/{key.member}.{key.turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _resume(sequence: Sequence, prefix: Generation, vocab_size: int) -> None:
    name = f"request {sequence.request_id}: its prefix"
    ids = _ids_of(prefix.token_ids, name, vocab_size)
    lengths = [len(prefix.logprobs), len(prefix.policy_versions)]
    lengths += [len(prefix.sampling_mask.offsets) - 1] if prefix.sampling_mask is not None else []
    lengths += [len(prefix.expert_routing)] if prefix.expert_routing is not None else []
    if prefix.prompt_routing is not None and len(prefix.prompt_routing) != sequence.prompt_length - 1:
        raise RequestRefused(f"{name} has expert routes of a prompt of another length")
    if set(lengths) - {len(ids)}:
        raise RequestRefused(f"{name} has {len(ids)} tokens, and records of {sorted(set(lengths))}")
    sequence.ids.extend(ids)
    sequence.logprobs.extend(float(p) for p in prefix.logprobs)
    sequence.versions.extend(int(v) for v in prefix.policy_versions)
    if sequence.masks is not None and prefix.sampling_mask is not None:
        sequence.masks.extend(split_masks(prefix.sampling_mask))
    elif sequence.masks is not None and sequence.count:
        raise RequestRefused(
            f"request {sequence.request_id}: its prefix has no sampling mask, so the whole can have none"
        )
    if sequence.routes is not None and prefix.expert_routing is not None:
        sequence.routes.extend(prefix.expert_routing)
        sequence.prompt_routes = prefix.prompt_routing
    elif sequence.routes is not None and sequence.count:
        raise RequestRefused(
            f"request {sequence.request_id}: its prefix has no expert routes, so the whole can have none"
        )
    sequence.reported = sequence.count
    if sequence.count:
        last = sequence.ids[-1]
        if last in sequence.stop_ids and sequence.count > sequence.request.sampling.min_tokens:
            sequence.finish_reason, sequence.matched_stop = "stop", last
        elif sequence.count >= sequence.limit:
            sequence.finish_reason = "length"


def check_finish(sequence: Sequence, tokenizer: Any) -> bool:
    """Whether the token just appended ends the sequence; says why in it."""
    sampling, token = sequence.request.sampling, sequence.ids[-1]
    if token in sequence.stop_ids:
        sequence.finish_reason, sequence.matched_stop = "stop", token
    elif (
        sampling.stop
        and sequence.count > sampling.min_tokens
        and (found := _stop_string(sequence, tokenizer)) is not None
    ):
        sequence.finish_reason, sequence.matched_stop = "stop", found
    elif sequence.count >= sequence.limit:
        sequence.finish_reason = "length"
    return sequence.finish_reason is not None


def _stop_string(sequence: Sequence, tokenizer: Any) -> str | None:
    """The stop string that the last token completed; of several, the one that ends first.

    Only a tail is decoded: a string of n bytes lies in the last n tokens, and a few more keep the borders whole.
    """
    stops = sequence.request.sampling.stop
    window = max(len(stop.encode()) for stop in stops) + 8
    tail = sequence.ids[max(sequence.prompt_length, len(sequence.ids) - window) :]
    before = tokenizer.decode(tail[:-1], skip_special_tokens=False).rstrip("\ufffd")
    text = tokenizer.decode(tail, skip_special_tokens=False)
    ends = []
    for stop in stops:
        at = text.find(stop, max(0, len(before) - len(stop) + 1))
        if at >= 0:
            ends.append((at + len(stop), stop))
    return min(ends)[1] if ends else None
