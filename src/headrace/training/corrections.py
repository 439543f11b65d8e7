"""Turns log-ratios between two policies into importance weights and keep masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.training.config import CorrectionConfig

MAX_LOG_RATIO = 20.0
"""exp of more is no weight any more; the clamp keeps a ratio finite in float32."""


class Correction(NamedTuple):
    """weights: [M] factor of each target's loss; keep: [M] bool, False where the ratio was outside the band."""

    weights: Tensor
    keep: Tensor


def sequence_mean(values: Tensor, samples: Tensor, n_samples: int) -> Tensor:
    """[M] each target's value replaced by the mean over its sample."""
    totals = values.new_zeros(n_samples).index_add_(0, samples, values)
    sizes = values.new_zeros(n_samples).index_add_(0, samples, torch.ones_like(values))
    return (totals / sizes.clamp(min=1))[samples]


def importance_ratios(log_ratios: Tensor, samples: Tensor, n_samples: int, level: str) -> Tensor:
    """[M] exp(log ratio): of the token, of its whole sample (the product over the tokens), or their geometric mean."""
    if level == "sequence":
        log_ratios = log_ratios.new_zeros(n_samples).index_add_(0, samples, log_ratios)[samples]
    elif level == "geometric":
        log_ratios = sequence_mean(log_ratios, samples, n_samples)
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def interpolate_proximal(current: Tensor, behavior: Tensor, lags: Tensor) -> Tensor:
    """[M] log pi_proximal = a log pi_behaviour + (1 - a) log pi_current, with a = 1 / lag and 0 for a lag of 0.

    A proximal policy without a forward pass of its own (A-3PO, 2025; AReaL's "log-linear"): one version back it is the behaviour
    policy, further back it lies nearer to the current one. lags: [M] versions between trainer and sampled token.
    """
    share = torch.where(lags > 0, 1.0 / lags.clamp(min=1), 0.0).to(current.dtype)
    # Not share * behaviour + ...: a masked token's behaviour log-probability may be anything, and 0 * inf is NaN.
    return torch.where(share > 0, torch.lerp(current, behavior.to(current.dtype), share), current)


def correct(log_ratios: Tensor, samples: Tensor, n_samples: int, config: CorrectionConfig) -> Correction:
    """[M] log pi_proximal / pi_behaviour -> weights and mask.

    truncate: min(ratio, high) (Espeholt et al. 2018; Yao et al. 2025); mask: the ratio inside [low, high], else left out.
    """
    everything = torch.ones_like(log_ratios, dtype=torch.bool)
    ratios = importance_ratios(log_ratios, samples, n_samples, config.level)
    if config.kind == "truncate":
        return Correction(ratios.clamp(max=config.high), everything)
    keep = (ratios >= config.low) & (ratios <= config.high)
    return Correction(torch.where(keep, ratios, 0.0), keep)
