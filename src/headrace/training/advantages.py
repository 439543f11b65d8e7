"""Turns scores and values into credit: group-relative baselines, GAE and V-trace, as pure functions of arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.errors import TrainingFailed
from headrace.training.config import AdvantageConfig
from headrace.training.registry import resolve
from headrace.types import Array, Group

logger = logging.getLogger(__name__)

AdvantageFn = Callable[[Array, AdvantageConfig], Array]
"""[E] rewards of one group's scored episodes, at least two and not all equal -> [E] advantages."""


# ------------------------------------------------------------------------------------------------- group baselines


def grpo(rewards: Array, config: AdvantageConfig) -> Array:
    """[E] (r - mean) / (std + eps), with the sample standard deviation. Shao et al. 2024, arXiv:2402.03300."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + config.eps)


def dr_grpo(rewards: Array, config: AdvantageConfig) -> Array:
    """[E] r - mean: without the division that favours groups of little spread. Liu et al. 2025, arXiv:2503.20783."""
    return rewards - rewards.mean()


def leave_one_out(rewards: Array, config: AdvantageConfig) -> Array:
    """[E] r - mean of the others. Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740."""
    return rewards - (rewards.sum() - rewards) / (rewards.size - 1)


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo, "dr_grpo": dr_grpo, "leave_one_out": leave_one_out}


def rewards_of(group: Group) -> Array:
    """[E] float64 rewards, NaN where the score is None or not a finite number."""
    values = np.array([np.nan if s.reward is None else s.reward for s in group.scores], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def is_zero_variance(rewards: Array) -> bool:
    """Fewer than two valid rewards, or a spread that is only rounding: nothing to learn from the comparison."""
    valid = [reward for reward in rewards.tolist() if reward == reward]
    if len(valid) < 2:
        return True
    low, high = min(valid), max(valid)
    return high - low <= 1e-9 * max(1.0, abs(low), abs(high))


def advantage_function(config: AdvantageConfig) -> AdvantageFn:
    """The rule that the config names. Raises `ConfigError` when it cannot be imported."""
    return resolve(config.function or config.kind, ADVANTAGES, "training.advantage.function")


def group_advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[Array]:
    """One [E] array a group: the advantage of each of its episodes, NaN for an episode without a score (it is left out).

    The baseline is taken over attempts (episodes), never over the segments that an attempt was cut into. A group without
    spread, and a group of one, gives exactly 0.
    """
    rule = advantage_function(config)
    advantages = []
    for group in groups:
        rewards = rewards_of(group)
        valid = ~np.isnan(rewards)
        result = np.where(valid, 0.0, np.nan)
        if (scored := int(np.count_nonzero(valid))) < 2:
            logger.warning("group %s has %d scored episodes: its advantages are 0", group.group_id, scored)
        elif not is_zero_variance(rewards):
            try:
                credit = np.asarray(rule(rewards[valid], config), dtype=np.float64)
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
                raise TrainingFailed(f"training.advantage.function: {config.function!r} raised {words}") from error
            if credit.shape != (scored,) or not np.isfinite(credit).all():
                raise TrainingFailed(
                    f"training.advantage.function: {config.function!r} gave {credit.tolist()} for the rewards "
                    f"{rewards[valid].tolist()}; wanted as many finite numbers"
                )
            result[valid] = credit
        advantages.append(result)
    return advantages


def whiten(values: Array, mask: Array, eps: float = 1e-8) -> Array:
    """[...] to mean 0 and deviation 1 over mask; unchanged with fewer than two valid values or no spread."""
    valid = values[mask.astype(bool)]
    if valid.size < 2 or np.ptp(valid) == 0:
        return values
    return np.where(mask.astype(bool), (values - valid.mean()) / (valid.std(ddof=1) + eps), values)


def masked_mean(values: Array, mask: Array) -> float:
    """Mean over mask, 0 when nothing is valid."""
    keep = mask.astype(bool)
    return float(values[keep].mean()) if keep.any() else 0.0


# -------------------------------------------------------------------------------------------------- value baselines


class Credit(NamedTuple):
    """advantages, targets: of the same shape as the rewards; targets are what the value function should say."""

    advantages: Array
    targets: Array


def _masked(valid: Array | None, *arrays: Array) -> tuple[Array, ...]:
    """The arrays with 0 where a row is not valid, whatever stood there: 0 * NaN would reach the rows before it."""
    return arrays if valid is None else tuple(np.where(valid, array, 0.0) for array in arrays)


def _next_values(values: Array, bootstrap: Array, cut: Array, cut_values: Array | None) -> Array:
    """[T, ...] V of the following state: the next row, `bootstrap` after the last, `cut_values` where a path was cut."""
    following = np.concatenate([values[1:], bootstrap[None]])
    return following if cut_values is None else np.where(cut, cut_values, following)


def gae(
    rewards: Array,
    values: Array,
    bootstrap: Array | float,
    discounts: Array,
    lam: float,
    truncated: Array | None = None,
    truncation_values: Array | None = None,
    valid: Array | None = None,
) -> Credit:
    """[T, ...] generalised advantage estimates: A_t = d_t + discount_t lam A_{t+1}. Schulman et al. 2016, arXiv:1506.02438.

    discounts: gamma, and 0 where the episode terminated
    truncated: the path was cut after this step; it bootstraps from `truncation_values` and nothing later flows back
    valid: False for a row that is no step (a reset row, which follows an end): both results are 0 there, whatever it holds
    """
    rewards, values = _masked(valid, rewards, values)
    cut = np.zeros(rewards.shape, dtype=bool) if truncated is None else truncated.astype(bool)
    last = np.broadcast_to(np.asarray(bootstrap, dtype=np.float64), rewards.shape[1:])
    deltas = rewards + discounts * _next_values(values, last, cut, truncation_values) - values
    advantages = np.zeros(rewards.shape)
    running = np.zeros(rewards.shape[1:])
    for t in reversed(range(len(rewards))):
        running = deltas[t] + np.where(cut[t], 0.0, discounts[t] * lam) * running
        advantages[t] = running
    return Credit(*_masked(valid, advantages, advantages + values))


def token_gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> Credit:
    """[T] GAE over the tokens that a policy sampled: the others are passed over, so time does not run through them.

    A reward on a token that was not sampled belongs to the sampled token before it (to the first one, if there is none).
    Both results are 0 where mask is 0.
    """
    valid = np.flatnonzero(mask)
    advantages, targets = np.zeros(rewards.shape), np.zeros(rewards.shape)
    if valid.size:
        owner = np.maximum(np.searchsorted(valid, np.arange(len(rewards)), side="right") - 1, 0)
        moved = np.bincount(owner, weights=rewards, minlength=valid.size)
        credit = gae(moved, values[valid], 0.0, np.full(valid.size, gamma), lam)
        advantages[valid], targets[valid] = credit
    return Credit(advantages, targets)


def vtrace(
    rhos: Array,
    rewards: Array,
    values: Array,
    bootstrap: Array | float,
    discounts: Array,
    truncated: Array | None = None,
    truncation_values: Array | None = None,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    valid: Array | None = None,
    lam: float = 1.0,
    weighted: bool = True,
) -> Credit:
    """[T, ...] V-trace. Espeholt et al. 2018, arXiv:1802.01561.

    rhos: current over behaviour probability of each action; lam: shortens the traces, c_t = lam min(rho, clip) (remark 2)
    targets: v_t = V_t + sum_k discounts...c (d_k)
    advantages: min(rho, clip) (r_t + discount_t (lam v_{t+1} + (1 - lam) V_{t+1}) - V_t), on-policy those of `gae`
    weighted: False leaves min(rho, clip) out of the advantages, for a surrogate that has the ratio in it already
    truncated, truncation_values, valid: as for `gae`
    """
    rhos, rewards, values = _masked(valid, rhos, rewards, values)
    cut = np.zeros(rewards.shape, dtype=bool) if truncated is None else truncated.astype(bool)
    last = np.broadcast_to(np.asarray(bootstrap, dtype=np.float64), rewards.shape[1:])
    clipped, traces = np.minimum(rhos, clip_rho), lam * np.minimum(rhos, clip_c)
    deltas = clipped * (rewards + discounts * _next_values(values, last, cut, truncation_values) - values)
    corrections = np.zeros(rewards.shape)
    running = np.zeros(rewards.shape[1:])
    for t in reversed(range(len(rewards))):
        running = deltas[t] + np.where(cut[t], 0.0, discounts[t] * traces[t]) * running
        corrections[t] = running
    targets = values + corrections
    after = _next_values(values + lam * corrections, last, cut, truncation_values)
    advantages = (clipped if weighted else 1.0) * (rewards + discounts * after - values)
    return Credit(*_masked(valid, advantages, targets))
