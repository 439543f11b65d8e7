"""Turns rewards and values that are tensors into credit on their device: `advantages.gae` and `.vtrace` without a host copy."""

from __future__ import annotations

import torch
from torch import Tensor


def gae_tensors(
    rewards: Tensor, values: Tensor, following: Tensor, discounts: Tensor, lam: float, cut: Tensor
) -> tuple[Tensor, Tensor]:
    """[T, ...] advantages and targets. Schulman et al. 2016, arXiv:1506.02438.

    following: [T, ...] V of the state that a step led to; discounts: 0 where the episode terminated
    cut: the path ends after this step, so that nothing later flows back
    """
    decays = discounts * lam * ~cut
    advantages = _backwards(rewards + discounts * following - values, decays)
    return advantages, advantages + values


def vtrace_tensors(
    rhos: Tensor,
    rewards: Tensor,
    values: Tensor,
    following: Tensor,
    discounts: Tensor,
    cut: Tensor,
    clip_rho: float,
    clip_c: float,
    lam: float = 1.0,
    weighted: bool = True,
) -> tuple[Tensor, Tensor]:
    """[T, ...] advantages and targets; arguments as for `gae_tensors`. Espeholt et al. 2018, arXiv:1802.01561.

    rhos: current over behaviour probability of each action; lam: shortens the traces
    weighted: whether the advantages hold the bounded ratio
    """
    clipped = rhos.clamp(max=clip_rho)
    deltas = clipped * (rewards + discounts * following - values)
    corrections = _backwards(deltas, discounts * rhos.clamp(max=clip_c) * lam * ~cut)
    mixed = values + lam * corrections
    # After a cut, and after the last row, comes a state whose own target is not known: its value stands for it.
    after = torch.cat([torch.where(cut[:-1], following[:-1], mixed[1:]), following[-1:]])
    advantages = rewards + discounts * after - values
    return clipped * advantages if weighted else advantages, values + corrections


def _backwards(deltas: Tensor, decays: Tensor) -> Tensor:
    """[T, ...] A_t = delta_t + decay_t A_{t+1}."""
    found = torch.empty_like(deltas)
    running = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        running = torch.addcmul(deltas[t], decays[t], running)
        found[t] = running
    return found
