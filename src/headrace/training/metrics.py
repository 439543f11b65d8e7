"""Turns the groups of one batch into the numbers that practitioners watch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.training.advantages import is_zero_variance, rewards_of
from headrace.training.batching import Row, is_idle, rows_of_groups
from headrace.training.config import TrainingConfig
from headrace.types import Array, Group, Metrics, Stat, TokenBatch

FINISH_REASONS = ("stop", "length", "abort", "tool")


def _of(values: Sequence[float] | Array) -> Stat:
    array = np.asarray(values, dtype=np.float64)
    return Stat(float(array.sum()), float(array.size), float(array.max()) if array.size else float("-inf"))


def batch_metrics(
    groups: Sequence[Group],
    advantages: Sequence[Array] | None = None,
    config: TrainingConfig | None = None,
    rows: Sequence[Sequence[Row]] | None = None,
) -> Metrics:
    """Rewards, their spread, lengths and finish reasons of a batch's episodes; what training leaves out, when it is told.

    rows: the groups' (`batching.rows_of_groups`), where somebody has made them already
    """
    metrics: Metrics = {**_reward_metrics(groups), **_part_metrics(groups), **_length_metrics(groups)}
    if advantages is not None:
        flat = np.concatenate([np.asarray(a, dtype=np.float64) for a in advantages]) if len(advantages) else np.zeros(0)
        flat = flat[~np.isnan(flat)]
        metrics["advantage/mean"] = _of(flat)
        metrics["advantage/abs_mean"] = _of(np.abs(flat))
    if advantages is not None and config is not None:
        rows = rows_of_groups(groups, advantages, config) if rows is None else rows
        idle = [is_idle(r, config) for r in rows]
        metrics["batch/idle_groups"] = Stat(float(sum(idle)), 1.0)
        metrics["batch/empty"] = Stat(float(all(idle)), 1.0)
        metrics["batch/masked_sequences"] = Stat(float(sum(not row.weight for r in rows for row in r)), 1.0)
        metrics["batch/tokens"] = Stat(float(sum(row.targets.size for r in rows for row in r if row.weight)), 1.0)
    return metrics


def sharing_metrics(minibatches: Sequence[Sequence[TokenBatch]]) -> Metrics:
    """How many input tokens one pass over the batch computes, and how many there were without common starts."""
    micros = [micro for micros in minibatches for micro in micros]
    last = [np.flatnonzero(np.diff(micro.target_samples, append=-1)) for micro in micros]
    alone = sum(
        int((np.asarray(m.position_ids)[np.asarray(m.target_rows)[at]] + 1).sum())
        for m, at in zip(micros, last, strict=True)
    )
    inputs = sum(len(micro.token_ids) for micro in micros)
    return {
        "batch/inputs": Stat(float(inputs), 1.0),
        "batch/shared_share": Stat(1.0 - inputs / alone if alone else 0.0, 1.0),
    }


def _reward_metrics(groups: Sequence[Group]) -> Metrics:
    rewards = [rewards_of(group) for group in groups]
    flat = np.concatenate(rewards) if rewards else np.zeros(0)
    valid = flat[~np.isnan(flat)]
    scored = [r[~np.isnan(r)] for r in rewards]
    spreads = [r.std() for r in scored if r.size]
    return {
        "reward/mean": _of(valid),
        "reward/std": Stat(float(valid.std())) if valid.size else Stat(0.0, 0.0),
        "reward/group_std": _of(spreads),
        "reward/unscored": Stat(float(flat.size - valid.size), 1.0),
        "group/zero_variance_share": _of([float(is_zero_variance(r)) for r in rewards]),
        "group/too_small": Stat(float(sum(r.size < 2 for r in scored)), 1.0),
        "group/size_mean": _of([float(len(r)) for r in rewards]),
    }


def _part_metrics(groups: Sequence[Group]) -> Metrics:
    """The mean of each named reward part over the episodes that have it."""
    parts: dict[str, list[float]] = {}
    for score in (score for group in groups for score in group.scores):
        for name, value in score.parts.items():
            found = parts.setdefault(name, [])
            if value is not None and math.isfinite(value):
                found.append(float(value))
    return {f"reward/part/{name}": _of(values) for name, values in parts.items()}


def _length_metrics(groups: Sequence[Group]) -> Metrics:
    episodes = [episode for group in groups for episode in group.episodes]
    samples = [sample for episode in episodes for sample in episode.samples]
    lengths = np.array([episode.completion_length for episode in episodes], dtype=np.float64)
    reasons = [sample.finish_reason for sample in samples]
    metrics: Metrics = {"length/mean": _of(lengths)}
    if lengths.size:
        metrics["length/p50"] = Stat(float(np.percentile(lengths, 50)))
        metrics["length/p99"] = Stat(float(np.percentile(lengths, 99)))
        metrics["length/max"] = Stat(float(lengths.max()), 1.0, float(lengths.max()))
    metrics["length/prompt_mean"] = _of([len(s.token_ids) - s.completion_length for s in samples])
    metrics["length/truncated_share"] = _of([float(reason == "length") for reason in reasons])
    for name in FINISH_REASONS:
        metrics[f"finish/{name}"] = _of([float(reason == name) for reason in reasons])
    return metrics
