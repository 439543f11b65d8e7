"""Turns scored groups and their advantages into packed micro-batches, siblings sharing their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.protocols import Annotation
from headrace.training.advantages import is_zero_variance, rewards_of
from headrace.training.config import TrainingConfig
from headrace.types import Array, BatchCounts, Group, SamplingMask, TokenBatch, TokenSample


@dataclass(slots=True)
class _Row:
    """One sample to train on, cut to what the forward pass needs.

    tokens: [L] inputs and, last, the last target; first: index of the first target; targets: [m] indices into tokens
    """

    sample: TokenSample
    group: int
    weight: float
    tokens: Array
    first: int
    targets: Array
    advantages: Array


@dataclass(slots=True)
class _Tree:
    """Rows that share the root segment `prefix`."""

    prefix: Array
    rows: list[_Row] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Input tokens."""
        return len(self.prefix) + sum(len(row.tokens) - 1 - row.first for row in self.rows)


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
) -> list[list[TokenBatch]]:
    """[minibatch][micro-batch]: one pass over the groups, one optimiser step a minibatch.

    advantages: one [E] array a group, NaN for an episode that is left out (as `group_advantages` gives them)
    max_length: the constant L of constant-length normalising
    partial: the groups are part of a batch whose size is not known yet: the loss is left undivided (see `denominator`)

    A group without any advantage is left out of the forward pass when its gradient is exactly 0; it is still counted in
    what the loss is divided by. A minibatch with nothing to train is left out whole.
    """
    minibatches = []
    for part in np.array_split(np.arange(len(groups)), min(config.minibatches, max(len(groups), 1))):
        rows = [rows_of_group(groups[g], advantages[g], config, index) for index, g in enumerate(part)]
        counts = _count(rows, max_length)
        trained = [r for r in rows if not is_idle(r, config)]
        limit = config.micro_tokens
        trees = [tree for group_rows in trained for tree in _trees(group_rows, limit, share_prefix)]
        divided_by = BatchCounts(tokens=1, sequences=1, groups=1, max_length=max_length) if partial else counts
        micros = [_pack(micro, divided_by) for micro in _fill(trees, limit)]
        if micros and counts.tokens:
            minibatches.append(micros)
    return minibatches


def denominator(groups: Sequence[Group], advantages: Sequence[Array], config: TrainingConfig) -> int:
    """What the loss of `partial` micro-batches is still to be divided by, over all groups of the batch."""
    rows = [rows_of_group(group, a, config) for group, a in zip(groups, advantages, strict=True)]
    counts = _count(rows, 1)
    return max(1, counts.tokens if config.loss.normalise == "token" else counts.sequences)


def rows_of_group(group: Group, advantages: Array, config: TrainingConfig, index: int = 0) -> list[_Row]:
    """The group's samples that have targets and an advantage; a truncated one has weight 0 when the config masks them."""
    rows = []
    for episode, score, advantage in zip(group.episodes, group.scores, advantages, strict=True):
        if np.isnan(advantage):
            continue
        for segment, sample in enumerate(episode.samples):
            targets = np.flatnonzero(np.asarray(sample.loss_mask[1:])) + 1
            if not targets.size:
                continue
            credit = np.full(targets.size, advantage, dtype=np.float32)
            if score.per_token is not None and segment == 0:
                credit += np.asarray(score.per_token, dtype=np.float32)[targets]
            masked = config.loss.mask_truncated and sample.finish_reason == "length"
            tokens = np.asarray(sample.token_ids[: targets[-1] + 1], dtype=np.int64)
            rows.append(_Row(sample, index, 0.0 if masked else 1.0, tokens, int(targets[0]), targets, credit))
    return rows


def is_idle(rows: Sequence[_Row], config: TrainingConfig) -> bool:
    """The group's gradient is exactly 0 whatever the model says: no credit, no KL term, and a loss that we know."""
    if not any(row.weight for row in rows):
        return True
    known = not config.loss.function and config.loss.kl_coef == 0
    return known and not any(row.weight and row.advantages.any() for row in rows)


def _count(rows: Sequence[Sequence[_Row]], max_length: int) -> BatchCounts:
    counted = [[row for row in group if row.weight] for group in rows]
    return BatchCounts(
        tokens=sum(row.targets.size for group in counted for row in group),
        sequences=sum(len(group) for group in counted),
        groups=sum(1 for group in counted if group),
        max_length=max_length,
    )


def _trees(rows: Sequence[_Row], limit: int, share_prefix: bool) -> list[_Tree]:
    """Rows by common prompt; a tree above the limit is cut into several, the prompt in each."""
    trees: list[_Tree] = []
    by_prefix: dict[bytes, _Tree] = {}
    for row in rows:
        prefix = row.tokens[: row.first]
        tree = by_prefix.get(prefix.tobytes()) if share_prefix else None
        if tree is None or tree.size + len(row.tokens) - 1 - row.first > limit:
            tree = _Tree(prefix)
            trees.append(tree)
            by_prefix[prefix.tobytes()] = tree
        tree.rows.append(row)
    return trees


def _fill(trees: Sequence[_Tree], limit: int) -> list[list[_Tree]]:
    """First fit, in order. A tree above the limit (one long sample) is a micro-batch of its own."""
    micros: list[list[_Tree]] = []
    room: list[int] = []
    for tree in trees:
        at = next((i for i, free in enumerate(room) if free >= tree.size), None)
        if at is None:
            micros.append([])
            room.append(limit)
            at = len(micros) - 1
        micros[at].append(tree)
        room[at] -= tree.size
    return micros


def _pack(trees: Sequence[_Tree], counts: BatchCounts) -> TokenBatch:
    """Lay the trees' segments one after another and list the targets."""
    tokens, positions, lengths, parents = [], [], [], []
    target_rows, rows = [], []
    total = 0

    def add(ids: Array, first_position: int, parent: int) -> int:
        nonlocal total
        tokens.append(ids)
        positions.append(np.arange(first_position, first_position + len(ids)))
        lengths.append(len(ids))
        parents.append(parent)
        total += len(ids)
        return total - len(ids)

    for tree in trees:
        alone = len(tree.rows) == 1
        root_ids = tree.rows[0].tokens[:-1] if alone else tree.prefix
        root_at = add(root_ids, 0, -1)
        root = len(parents) - 1
        for row in tree.rows:
            inputs = row.tokens[row.first : -1]
            at = root_at + row.first if alone or not len(inputs) else add(inputs, row.first, root)
            # Token t is predicted by input t - 1: the first target by the root's last row, later ones by the row's own.
            before = row.targets - 1
            target_rows.append(np.where(before < row.first, root_at + before, at + before - row.first))
            rows.append(row)

    sizes = [row.targets.size for row in rows]
    return TokenBatch(
        token_ids=np.concatenate(tokens),
        position_ids=np.concatenate(positions),
        segment_ids=np.repeat(np.arange(len(lengths)), lengths),
        segment_parents=np.array(parents, dtype=np.int64),
        target_ids=np.concatenate([row.tokens[row.targets] for row in rows]),
        target_rows=np.concatenate(target_rows),
        target_samples=np.repeat(np.arange(len(rows)), sizes),
        target_positions=np.concatenate([np.arange(size) for size in sizes]),
        target_versions=_of_targets(rows, "policy_versions", np.int64),
        behavior_logprobs=_of_targets(rows, "behavior_logprobs", np.float32),
        advantages=np.concatenate([row.advantages for row in rows]),
        sample_ids=tuple(row.sample.sample_id for row in rows),
        sample_weights=np.array([row.weight for row in rows], dtype=np.float32),
        sample_groups=np.array([row.group for row in rows], dtype=np.int64),
        temperatures=np.array([row.sample.sampling.temperature for row in rows], dtype=np.float32),
        counts=counts,
        sampling_mask=_sampling_mask(rows),
    )


def _of_targets(rows: Sequence[_Row], name: str, dtype: type) -> Array:
    return np.concatenate([np.asarray(getattr(row.sample, name))[row.targets] for row in rows]).astype(dtype)


def _sampling_mask(rows: Sequence[_Row]) -> SamplingMask | None:
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
