"""Turns a batch of control steps into values, advantages and targets, under the weights that it is learned with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.policies.distributions import Distribution
from headrace.training.advantages import Credit, gae, vtrace
from headrace.training.backends.step_rows import Rows
from headrace.training.config import AlgorithmConfig
from headrace.types import Array, StepBatch


@torch.no_grad()
def credit_of(
    network: Any,
    distribution: Distribution,
    algorithm: AlgorithmConfig,
    batch: StepBatch,
    rows: Rows,
    values_of: Callable[[Rows], Tensor],
    values: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> tuple[Array, Credit]:
    """[T, B] values under the network's weights, and the credit made of them.

    values_of: gives the [T*B] values where nothing else is needed; values, logprobs: [T*B] if known
    """
    steps, count = batch.rewards.shape
    last = {name: leaf[-1] for name, leaf in rows.leaves.items()}
    final = {name: torch.from_numpy(leaf) for name, leaf in batch.final_observations.items()}
    needs_ratio = algorithm.kind != "ppo"
    if network.recurrent:
        outputs, found, states = network.unroll(*rows.sequences(slice(None)))
        values = found.flatten()
        bootstrap = network.value_after(last, states[-1])
        logprobs = distribution.logprobs(outputs.flatten(0, 1), rows.actions)
        t, n = torch.from_numpy(batch.ended).T
        at = {name: torch.stack([s[name] for s in states])[t, n] for name in states[0]} if len(t) else {}
        cut_values = network.value_after(final, at) if len(t) else None
    else:
        if values is None:
            if needs_ratio:
                outputs, values = network.evaluate(rows.observations)
                logprobs = distribution.logprobs(outputs, rows.actions)
            else:
                values = values_of(rows)
        bootstrap = network.values(last)
        cut_values = network.values(final) if len(batch.ended) else None
    mean, std = network.value_mean, network.value_std
    own = (values * std + mean).view(steps, count).numpy()
    after = (bootstrap * std + mean).numpy()
    following = np.concatenate([own[1:], after[None]])
    if cut_values is not None:
        following[batch.ended[:, 0], batch.ended[:, 1]] = (cut_values * std + mean).numpy()
    path = {"truncated": batch.cut, "truncation_values": following, "valid": batch.valid}
    if not needs_ratio:
        return own, gae(batch.rewards, own, after, batch.discounts, algorithm.lam, **path)
    assert logprobs is not None
    ratios = np.exp(np.clip(logprobs.view(steps, count).numpy() - batch.behavior_logprobs, -20, 20))
    how = {"clip_rho": algorithm.clip_rho, "clip_c": algorithm.clip_c, "lam": algorithm.lam}
    how["weighted"] = algorithm.kind == "impala"  # the surrogate of appo has the ratio in it
    return own, vtrace(ratios, batch.rewards, own, after, batch.discounts, **path, **how)
