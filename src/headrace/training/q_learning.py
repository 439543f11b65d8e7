"""Turns sampled transitions and Q values into targets and losses: DQN, and soft actor-critic with its squashed Gaussian.

Pure functions of tensors. `B` counts transitions; a transition spans up to n steps of one episode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

# --------------------------------------------------------------------------------------------------------- targets


def n_step_returns(rewards: Tensor, steps: Tensor, terminated: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """[B] returns sum_{j<k} gamma^j r_j and [B] discounts gamma^k of the state k steps on. Sutton 1988; Mnih et al. 2016.

    rewards: [B, n]; what stands at or after `steps` is not counted, whatever it is
    steps: [B] k, the steps from 1 to n that the transition spans: fewer than n before an end or a cut
    terminated: [B] the k-th step ended the episode: its discount is 0. A time-out bootstraps
    """
    if rewards.ndim != 2 or steps.shape != rewards.shape[:1] or terminated.shape != steps.shape:
        found = f"{tuple(rewards.shape)}, {tuple(steps.shape)}, {tuple(terminated.shape)}"
        raise ValueError(f"rewards must be [B, n], steps and terminated [B]; found {found}")
    powers = torch.arange(rewards.shape[1], device=rewards.device, dtype=rewards.dtype)
    counted = powers < steps[:, None]
    returns = torch.where(counted, rewards * gamma**powers, 0.0).sum(1)
    return returns, torch.where(terminated, 0.0, gamma ** steps.to(rewards.dtype))


def q_targets(returns: Tensor, discounts: Tensor, next_target_q: Tensor, next_online_q: Tensor | None = None) -> Tensor:
    """[B] return + discount Q_target(s', a*), without gradient.

    next_target_q: [B, A] of the target network. Mnih et al. 2015: a* is its own best action
    next_online_q: [B, A]; given, a* is the online network's best action (double Q). van Hasselt et al. 2016, arXiv:1509.06461
    """
    chooser = next_target_q if next_online_q is None else next_online_q
    best = next_target_q.gather(1, chooser.argmax(1, keepdim=True)).squeeze(1)
    return (returns + discounts * best).detach()


def soft_q_targets(
    returns: Tensor, discounts: Tensor, next_q1: Tensor, next_q2: Tensor, next_logprobs: Tensor, temperature: Tensor
) -> Tensor:
    """[B] return + discount (min(Q1, Q2)(s', a') - temperature log pi(a'|s')), without gradient.

    The Q values are the target networks', a' is drawn from the current policy. Haarnoja et al. 2018, arXiv:1812.05905.
    """
    soft = torch.minimum(next_q1, next_q2) - temperature * next_logprobs
    return (returns + discounts * soft).detach()


# ---------------------------------------------------------------------------------------------------------- losses


def q_loss(q: Tensor, targets: Tensor, weights: Tensor, huber: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scalar mean of weight times Huber loss, and [B] errors target - Q without gradient (the new priorities).

    q: [B] of the actions taken; weights: [B] of importance, 1 for uniform replay
    huber: where the loss becomes linear; infinity: half the square everywhere
    """
    errors = targets - q
    if math.isinf(huber):
        losses = errors.square() / 2
    else:
        losses = F.huber_loss(q, targets, reduction="none", delta=huber)
    return (weights * losses).mean(), errors.detach()


def taken(q: Tensor, actions: Tensor) -> Tensor:
    """[B] Q(s, a) of the actions taken; q: [B, A], actions: [B]."""
    return q.gather(1, actions.long().unsqueeze(1)).squeeze(1)


def twin_q_loss(q1: Tensor, q2: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scalar sum of both squared losses, and [B] the mean of both errors' sizes. Fujimoto et al. 2018, arXiv:1802.09477."""
    first, errors1 = q_loss(q1, targets, weights, math.inf)
    second, errors2 = q_loss(q2, targets, weights, math.inf)
    return first + second, (errors1.abs() + errors2.abs()) / 2


def soft_policy_loss(logprobs: Tensor, q1: Tensor, q2: Tensor, temperature: Tensor) -> Tensor:
    """Scalar mean of temperature log pi(a|s) - min(Q1, Q2)(s, a) over actions drawn with their gradient (reparameterised).

    Haarnoja et al. 2018, arXiv:1812.05905, equation 7.
    """
    return (temperature.detach() * logprobs - torch.minimum(q1, q2)).mean()


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """Scalar -temperature mean(log pi + target entropy): it grows while the policy's entropy is below the target.

    Haarnoja et al. 2018, arXiv:1812.05905, equation 18.
    """
    return -(log_temperature.exp() * (logprobs.detach() + target_entropy)).mean()


# ---------------------------------------------------------------------------------------------- squashed Gaussian


def squash(raw: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[..., D] raw actions to bounded ones: low + (high - low) (tanh(u) + 1) / 2."""
    return low + (high - low) * (torch.tanh(raw) + 1) / 2


def squash_log_det(raw: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[...] log |d squash(u) / du| = sum log((high - low) / 2) + 2 (log 2 - u - softplus(-2u)): exact where tanh is 1.

    Haarnoja et al. 2018, arXiv:1812.05905, appendix C.
    """
    log_slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return (log_slope + ((high - low) / 2).log()).sum(-1)


def gaussian_logprobs(raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """[...] log density of independent normals, summed over the last axis."""
    return (-((raw - mean) / log_std.exp()).square() / 2 - log_std - math.log(2 * math.pi) / 2).sum(-1)


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] bounded actions squash(mean + std noise) and their [...] log density, both with gradient."""
    raw = mean + log_std.exp() * noise
    logprobs = gaussian_logprobs(raw, mean, log_std) - squash_log_det(raw, low, high)
    return squash(raw, low, high), logprobs


# ------------------------------------------------------------------------------------------------- target network


@torch.no_grad()
def follow(target: Iterable[Tensor], online: Iterable[Tensor], rate: float) -> None:
    """target += rate (online - target), in place; rate 1 copies. Lillicrap et al. 2016, arXiv:1509.02971."""
    for slow, fast in zip(target, online, strict=True):
        slow.lerp_(fast, rate)
