"""Turns scored groups and their advantages into packed micro-batches, in which every common start is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace.errors import DataError
from headrace.protocols import Annotation
from headrace.training.advantages import is_zero_variance, rewards_of
from headrace.training.config import TrainingConfig
from headrace.types import Array, BatchCounts, Group, LogitShape, SamplingMask, TokenBatch, TokenSample


@dataclass(slots=True)
class Row:
    """One sample to train on, cut to what the forward pass needs; `group` counts within the batch, `number` in the group.

    tokens: [L] inputs and, last, the last target; targets: [m] indices into tokens
    """

    sample: TokenSample
    group: int
    number: int
    weight: float
    tokens: Array
    targets: Array
    advantages: Array

    @property
    def inputs(self) -> Array:
        """[L-1]: the last target is never fed in."""
        return self.tokens[:-1]

    @property
    def routes(self) -> Array | None:
        """[L-1, layers, top_k] recorded experts of the inputs."""
        recorded = self.sample.expert_routing
        return None if recorded is None else recorded[: len(self.inputs)]


def annotations_needed(config: TrainingConfig) -> tuple[Annotation, ...]:
    """What `TrainBackend.annotate` must fill before the first update of a batch.

    A proximal policy that takes only one update a batch is the current one: the loss then needs no extra pass for it.
    """
    several_updates = config.epochs * config.minibatches > 1
    needed: list[Annotation] = ["reference"] if config.loss.kl_coef > 0 else []
    if config.loss.old_logprobs == "trainer" and several_updates:
        needed.append("proximal")
    return tuple(needed)


def filter_zero_variance(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """(groups whose scores differ, groups whose scores are all equal or fewer than two)."""
    kept = [group for group in groups if not is_zero_variance(rewards_of(group))]
    dropped = [group for group in groups if is_zero_variance(rewards_of(group))]
    return kept, dropped


def make_batches(
    groups: Sequence[Group],
    advantages: Sequence[Array],
    config: TrainingConfig,
    *,
    max_length: int,
    share_prefix: bool = True,
    partial: bool = False,
    rows: Sequence[Sequence[Row]] | None = None,
) -> list[list[TokenBatch]]:
    """[minibatch][micro-batch]: one pass over the groups, one optimiser step a minibatch.

    advantages: one [E] array a group, NaN for an episode that is left out (as `group_advantages` gives them)
    max_length: the constant L of constant-length normalising
    partial: the groups are part of a batch whose size is not known yet: the loss is left undivided (see `denominator`)
    rows: those of the groups, where somebody has made them already

    A group without any advantage is left out of the forward pass when its gradient is exactly 0; it is still counted in
    what the loss is divided by. A minibatch with nothing to train is left out whole.
    """
    minibatches = []
    every = rows_of_groups(groups, advantages, config) if rows is None else rows
    for part in np.array_split(np.arange(len(groups)), min(config.minibatches, max(len(groups), 1))):
        rows = [every[g] for g in part]
        counts = _count(rows, max_length)
        trained = [row for group_rows in rows if not is_idle(group_rows, config) for row in group_rows]
        divided_by = BatchCounts(tokens=1, sequences=1, groups=1, max_length=max_length) if partial else counts
        first = int(part[0]) if part.size else 0
        micros = [_pack(*micro, divided_by, first) for micro in _micros(trained, config.micro_tokens, share_prefix)]
        if micros and counts.tokens:
            minibatches.append(micros)
    return minibatches


def denominator(groups: Sequence[Group], advantages: Sequence[Array], config: TrainingConfig) -> int:
    """What the loss of `partial` micro-batches is still to be divided by, over all groups of the batch."""
    counts = _count(rows_of_groups(groups, advantages, config), 1)
    return max(1, counts.tokens if config.loss.normalise == "token" else counts.sequences)


def rows_of_groups(groups: Sequence[Group], advantages: Sequence[Array], config: TrainingConfig) -> list[list[Row]]:
    """[group] its samples that have targets and an advantage; a truncated one has weight 0 when the config masks them."""
    rows: list[list[Row]] = [[] for _ in groups]
    found = []
    for index, (group, credits) in enumerate(zip(groups, advantages, strict=True)):
        for episode, score, advantage in zip(group.episodes, group.scores, np.asarray(credits).tolist(), strict=True):
            if advantage == advantage:  # not NaN
                for segment, sample in enumerate(episode.samples):
                    found.append((index, sample, advantage, score.per_token if segment == 0 else None))
    if not found:
        return rows
    # One search in all masks together; a first token is nobody's target.
    lengths = np.array([len(sample.loss_mask) for _, sample, _, _ in found])
    starts = np.cumsum(lengths) - lengths
    mask = np.concatenate([sample.loss_mask for _, sample, _, _ in found]) != 0
    mask[starts[lengths > 0]] = False
    places = np.flatnonzero(mask)
    bounds = np.searchsorted(places, [*starts.tolist(), len(mask)]).tolist()
    places -= np.repeat(starts, np.diff(bounds))
    for (index, sample, advantage, per_token), (low, high) in zip(found, pairwise(bounds), strict=True):
        if low == high:
            continue
        targets = places[low:high]
        credit = np.full(high - low, advantage, dtype=np.float32)
        if per_token is not None:
            credit += np.asarray(per_token, dtype=np.float32)[targets]
        masked = config.loss.mask_truncated and sample.finish_reason == "length"
        tokens = np.asarray(sample.token_ids[: int(targets[-1]) + 1], dtype=np.int64)
        rows[index].append(Row(sample, index, len(rows[index]), 0.0 if masked else 1.0, tokens, targets, credit))
    return rows


def is_idle(rows: Sequence[Row], config: TrainingConfig) -> bool:
    """The group's gradient is exactly 0 whatever the model says: no credit, no KL term, and a loss that we know."""
    if not any(row.weight for row in rows):
        return True
    known = not config.loss.function and config.loss.kl_coef == 0
    return known and not any(row.weight and row.advantages.any() for row in rows)


def _count(rows: Sequence[Sequence[Row]], max_length: int) -> BatchCounts:
    counted = [[row for row in group if row.weight] for group in rows]
    return BatchCounts(
        tokens=sum(row.targets.size for group in counted for row in group),
        sequences=sum(len(group) for group in counted),
        groups=sum(1 for group in counted if group),
        max_length=max_length,
    )


def _micros(rows: Sequence[Row], limit: int, share_prefix: bool) -> Iterator[tuple[list[Row], list[int]]]:
    """(rows, how many leading inputs each shares with the row before it) of one micro-batch after the other.

    In the order of their tokens, neighbours have the most in common, and a row adds only what it does not share. A
    micro-batch is full when the next row would take it above `limit` inputs; one row above it is a micro-batch of its own.
    """
    if share_prefix:
        rows = sorted(rows, key=lambda row: row.inputs.astype(">u4").tobytes())
    micro: list[Row] = []
    shared: list[int] = []
    size = 0
    for row in rows:
        common = _common(micro[-1], row) if micro and share_prefix else 0
        if micro and size + len(row.inputs) - common > limit:
            yield micro, shared
            micro, shared, size, common = [], [], 0, 0
        micro.append(row)
        shared.append(common)
        size += len(row.inputs) - common
    if micro:
        yield micro, shared


def _common(a: Row, b: Row) -> int:
    """Length of the common start of their inputs: the same tokens, and the same experts where those were recorded."""
    n = _agree(a.inputs, b.inputs)
    return min(n, _agree(a.routes, b.routes)) if a.routes is not None and b.routes is not None else n


def _agree(a: Array, b: Array) -> int:
    """How many first entries are equal."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    if different.ndim > 1:
        different = different.reshape(n, -1).any(axis=1)
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


def _pack(rows: Sequence[Row], shared: Sequence[int], counts: BatchCounts, first_group: int) -> TokenBatch:
    """Lay out the tree of the rows' inputs, each common start once, depth first; then list the targets by sample."""
    tokens, positions, lengths, parents = [], [], [], []
    input_rows: list[Array] = []
    total = 0
    # Where the inputs of the row in hand stand: its path overwrites what its cousins left behind.
    places = np.zeros(max(len(row.inputs) for row in rows), dtype=np.int64)
    ranges = [(0, len(rows), 0, -1)]
    while ranges:
        low, high, depth, parent = ranges.pop()
        end = min(shared[low + 1 : high], default=len(rows[low].inputs))
        if end > depth:
            tokens.append(rows[low].inputs[depth:end])
            positions.append(np.arange(depth, end))
            places[depth:end] = np.arange(total, total + end - depth)
            lengths.append(end - depth)
            parents.append(parent)
            parent = len(parents) - 1
            total += end - depth
        if high - low == 1:
            input_rows.append(places[: len(rows[low].inputs)].copy())
            continue
        cuts = [low, *(i for i in range(low + 1, high) if shared[i] == end), high]
        ranges.extend((a, b, end, parent) for a, b in reversed(list(pairwise(cuts))))
    by_sample = sorted(range(len(rows)), key=lambda i: (rows[i].group, rows[i].number))
    rows, input_rows = [rows[i] for i in by_sample], [input_rows[i] for i in by_sample]

    sizes = [row.targets.size for row in rows]
    targets = np.concatenate([row.targets for row in rows])
    # Where the targets stand in all samples, and in all rows' inputs, one after another. Token t is predicted by input t - 1.
    in_samples = targets + np.repeat(_starts([len(row.sample.token_ids) for row in rows]), sizes)
    in_inputs = targets - 1 + np.repeat(_starts([len(at) for at in input_rows]), sizes)

    def of_targets(name: str) -> Array:
        found = [getattr(row.sample, name) for row in rows]
        for row, one in zip(rows, found, strict=True):
            if len(one) != len(row.sample.token_ids):  # all samples after it would be taken from the wrong places
                raise DataError(
                    f"{row.sample.sample_id}: {len(one)} {name} for {len(row.sample.token_ids)} tokens; give as many"
                )
        return np.concatenate(found)[in_samples]

    return TokenBatch(
        token_ids=np.concatenate(tokens),
        position_ids=np.concatenate(positions),
        segment_ids=np.repeat(np.arange(len(lengths)), lengths),
        segment_parents=np.array(parents, dtype=np.int64),
        target_ids=of_targets("token_ids").astype(np.int64),
        target_rows=np.concatenate(input_rows)[in_inputs],
        target_samples=np.repeat(np.arange(len(rows)), sizes),
        target_positions=np.arange(len(targets)) - np.repeat(_starts(sizes), sizes),
        target_versions=of_targets("policy_versions").astype(np.int64),
        behavior_logprobs=of_targets("behavior_logprobs").astype(np.float32),
        advantages=np.concatenate([row.advantages for row in rows]),
        sample_ids=tuple(row.sample.sample_id for row in rows),
        sample_weights=np.array([row.weight for row in rows], dtype=np.float32),
        sample_groups=np.array([row.group for row in rows], dtype=np.int64) - first_group,
        temperatures=np.array([row.sample.sampling.temperature for row in rows], dtype=np.float32),
        counts=counts,
        logit_shapes=_logit_shapes(rows),
        sampling_mask=_sampling_mask(rows),
        expert_routing=_expert_routing(rows, input_rows, total),
    )


def _starts(lengths: Sequence[int]) -> Array:
    """[N] where each of N pieces begins when they stand one after another."""
    return np.cumsum([0, *lengths[:-1]])


def _expert_routing(rows: Sequence[Row], input_rows: Sequence[Array], inputs: int) -> Array | None:
    """[N, layers, top_k] experts of the inputs, -1 where a sample has none. None when nothing was recorded."""
    recorded = next((row.sample.expert_routing for row in rows if row.sample.expert_routing is not None), None)
    if recorded is None:
        return None
    routes = np.full((inputs, *recorded.shape[1:]), -1, dtype=np.int16)
    for row, at in zip(rows, input_rows, strict=True):
        if row.routes is not None:
            routes[at] = row.routes
    return routes


def _logit_shapes(rows: Sequence[Row]) -> tuple[LogitShape, ...] | None:
    shapes = tuple(row.sample.sampling.logit_shape for row in rows)
    return shapes if any(shape != (1.0, ()) for shape in shapes) else None


def _sampling_mask(rows: Sequence[Row]) -> SamplingMask | None:
    """[M] supports of the targets; an empty one restricts nothing. None when no sample recorded any."""
    if all(row.sample.sampling_mask is None for row in rows):
        return None
    ids, lengths = [], []
    for row in rows:
        mask = row.sample.sampling_mask
        if mask is None:
            lengths.append(np.zeros(row.targets.size, dtype=np.int64))
            continue
        # Recorded for every token of the sample, or for the sampled ones only.
        every = len(mask.offsets) - 1 == len(row.sample.token_ids)
        sampled = np.cumsum(np.asarray(row.sample.loss_mask) != 0) - 1
        at = row.targets if every else sampled[row.targets]
        lengths.append(mask.offsets[at + 1] - mask.offsets[at])
        ids.extend(mask.token_ids[mask.offsets[a] : mask.offsets[a + 1]] for a in at)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return SamplingMask(token_ids=np.concatenate(ids).astype(np.int64), offsets=offsets)
