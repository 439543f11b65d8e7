"""Turns trajectories into one batch of steps, side by side, in which no transition runs across a reset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.types import Array, Metrics, Stat, StepBatch, Trajectory


def step_batch(trajectories: Sequence[Trajectory], gamma: float) -> StepBatch:
    """Trajectories of T steps and N environments each, joined along the environments."""
    firsts = np.cumsum([0, *(trajectory.rewards.shape[1] for trajectory in trajectories)])
    terminated, truncated, valid = (_join(trajectories, name) for name in ("terminated", "truncated", "valid"))
    ended, final = _cut_ends(trajectories, firsts)
    return StepBatch(
        observations=_join_leaves([t.observations for t in trajectories], axis=1),
        actions=_join(trajectories, "actions"),
        rewards=_join(trajectories, "rewards"),
        discounts=np.where(terminated, np.float32(0), np.float32(gamma)),
        cut=truncated,
        valid=valid,
        resets=resets(terminated | truncated, valid),
        behavior_logprobs=_join(trajectories, "behavior_logprobs"),
        policy_versions=_join(trajectories, "policy_versions"),
        ended=ended,
        final_observations=final,
        initial_state=_join_leaves([t.initial_state for t in trajectories], axis=0)
        if trajectories[0].initial_state
        else None,
    )


def resets(done: Array, valid: Array) -> Array:
    """[T, B] rows that are the first of an episode: after a reset row, or after an end that was reset at once.

    Row 0 is never one: the state before it already is zero where an episode begins.
    """
    first = np.zeros_like(done)
    first[1:] = ~valid[:-1] | (done[:-1] & valid[1:])
    return first


def _cut_ends(trajectories: Sequence[Trajectory], firsts: Array) -> tuple[Array, dict[str, Array]]:
    """(t, b) of the steps that a time limit ended with a reset at once, and their true last observations. Ends by
    termination bootstrap from nothing, so their last observations are left out."""
    places, leaves = [], []
    for trajectory, first in zip(trajectories, firsts, strict=False):
        if not len(trajectory.ended):
            continue
        t, n = trajectory.ended.T
        cut = trajectory.truncated[t, n]
        if cut.any():
            places.append(np.stack([t[cut], n[cut] + first], 1))
            leaves.append({name: leaf[cut] for name, leaf in trajectory.final_observations.items()})
    if not places:
        return np.zeros((0, 2), np.int64), {}
    return np.concatenate(places), _join_leaves(leaves, axis=0)


def _join(trajectories: Sequence[Trajectory], name: str) -> Array:
    arrays = [getattr(trajectory, name) for trajectory in trajectories]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)


def _join_leaves(parts: Sequence[dict[str, Array]], axis: int) -> dict[str, Array]:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts], axis=axis) for name in parts[0]}


def episode_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Returns and lengths of the episodes that ended in a batch, its steps, and how many of its rows were resets."""
    returns = np.concatenate([t.episode_returns for t in trajectories])
    lengths = np.concatenate([t.episode_lengths for t in trajectories])
    valid = float(sum(t.valid.sum() for t in trajectories))
    rows = float(sum(t.valid.size for t in trajectories))
    return {
        "episode/return": _stat(returns),
        "episode/return_max": _stat(returns),
        "episode/length": _stat(lengths),
        "episode/count": Stat(float(len(returns))),
        "batch/steps": Stat(valid),
        "batch/reset_share": Stat(rows - valid, rows),
        "reward/per_step": Stat(float(sum(t.rewards.sum() for t in trajectories)), valid),
    }


def _stat(values: Array) -> Stat:
    if not len(values):
        return Stat(0.0, 0.0)
    return Stat(float(values.sum()), float(len(values)), float(values.max()))
