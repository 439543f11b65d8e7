"""Turns flat log-probabilities and advantages into one loss and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.training.config import AlgorithmConfig, TrainingConfig
from headrace.training.corrections import (
    MAX_LOG_RATIO,
    Correction,
    correct,
    importance_ratios,
    interpolate_proximal,
)
from headrace.training.registry import resolve
from headrace.types import BatchCounts, Metrics, Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch, flat over its targets.

    logprobs: [M] under the current policy, with gradient
    behavior_logprobs, advantages: [M]
    samples: [M] which of the B samples a target belongs to; sample_weights: [B] 0 takes a sample out of the loss
    proximal_logprobs: [M], or None when no update was made since the batch was taken (then it equals the current policy)
    reference_logprobs: [M], when there is a KL term; entropies: [M], a metric
    versions: [M] the policy version that sampled the target; lags: [M] how many versions ago, when a config asks for it
    """

    logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    samples: Tensor
    sample_weights: Tensor
    versions: Tensor
    counts: BatchCounts
    config: TrainingConfig
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    lags: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """loss: scalar, this micro-batch's share of the optimiser step's loss."""

    loss: Tensor
    metrics: Metrics


LossFn = Callable[[LossInputs], LossOutputs]


# ----------------------------------------------------------------------------------------------------------- terms


def normaliser(inputs: LossInputs) -> Tensor:
    """[M] what each target's loss is multiplied by, so that micro-batches of any split add up to the same loss.

    token: 1 / tokens of the step; sequence: 1 / (sequences of the step * the sample's tokens); constant: 1 / (sequences * L).
    """
    counts, kind = inputs.counts, inputs.config.loss.normalise
    weights = inputs.sample_weights[inputs.samples]
    if kind == "token":
        return weights / max(counts.tokens, 1)
    if kind == "constant":
        return weights / max(counts.sequences * counts.max_length, 1)
    sizes = torch.zeros_like(inputs.sample_weights).index_add_(0, inputs.samples, torch.ones_like(weights))
    return weights / (sizes[inputs.samples] * max(counts.sequences, 1))


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """[M] estimates of KL(current || reference) from the current policy's samples. Schulman 2020, "Approximating KL".

    k1 = log p - log q; k2 = k1^2 / 2; k3 = q/p - 1 - log(q/p). The gradient of k1 itself is zero in expectation, so k1
    has its own value and the gradient of k2, which is that of the KL: all three pull towards the reference.
    """
    difference = (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k3":
        return torch.exp(-difference) - 1 + difference
    k2 = difference.square() / 2
    return k2 if estimator == "k2" else k2 + (difference - k2).detach()


def _correction(inputs: LossInputs) -> Correction | None:
    """The weight between behaviour and proximal policy, when the config asks for one.

    Where the ratio already is current / behaviour (clipped, old_logprobs = engine) it holds that weight, so masking only
    masks and truncating only takes away what is above `high`.
    """
    config, n_samples = inputs.config.correction, len(inputs.sample_weights)
    if config.kind == "none":
        return None
    log_ratios = _proximal(inputs) - inputs.behavior_logprobs
    found = correct(log_ratios, inputs.samples, n_samples, config)
    weighted_already = inputs.config.loss.kind == "clipped" and inputs.config.loss.old_logprobs == "engine"
    if not weighted_already:
        return found
    if config.kind == "mask":
        return Correction(found.keep.to(found.weights.dtype), found.keep)
    ratios = importance_ratios(log_ratios, inputs.samples, n_samples, config.level)
    return Correction((config.high / ratios).clamp(max=1.0), found.keep)


def _old_logprobs(inputs: LossInputs) -> Tensor:
    """[M] the denominator of the ratio."""
    if inputs.config.loss.old_logprobs == "engine":
        return inputs.behavior_logprobs
    return _proximal(inputs)


def _proximal(inputs: LossInputs) -> Tensor:
    """[M] the policy that the ratio is clipped around."""
    if inputs.config.loss.old_logprobs == "interpolated" and inputs.lags is not None:
        return interpolate_proximal(inputs.logprobs.detach(), inputs.behavior_logprobs, inputs.lags)
    return inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs


# ---------------------------------------------------------------------------------------------------------- losses


def clipped(inputs: LossInputs) -> LossOutputs:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = current / old. Schulman et al. 2017; clip-higher: Yu et al. 2025."""
    loss = inputs.config.loss
    ratios = (inputs.logprobs - _old_logprobs(inputs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratios.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    surrogate = -torch.minimum(ratios * inputs.advantages, bounded * inputs.advantages)
    too_high = (ratios > 1 + loss.clip_high) & (inputs.advantages > 0)
    too_low = (ratios < 1 - loss.clip_low) & (inputs.advantages < 0)
    return finish(inputs, surrogate, ratios.detach(), too_low, too_high)


def reinforce(inputs: LossInputs) -> LossOutputs:
    """-A log p: no ratio in the loss; importance weights come from the correction alone. Williams 1992."""
    ratios = (inputs.logprobs - _old_logprobs(inputs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    nothing = torch.zeros_like(ratios, dtype=torch.bool)
    return finish(inputs, -inputs.advantages * inputs.logprobs, ratios.detach(), nothing, nothing)


LOSSES: dict[str, LossFn] = {"clipped": clipped, "reinforce": reinforce}


def loss_function(config: TrainingConfig) -> LossFn:
    """The loss that the config names."""
    return resolve(config.loss.function or config.loss.kind, LOSSES, "training.loss.function")


def finish(inputs: LossInputs, per_token: Tensor, ratios: Tensor, too_low: Tensor, too_high: Tensor) -> LossOutputs:
    """Weigh, add KL, sum, and count."""
    scale = normaliser(inputs)
    counted = scale > 0
    # What the loss weighs each target with, ratio and correction together: its effective sample size is told.
    weights = ratios if inputs.config.loss.kind == "clipped" else torch.ones_like(ratios)
    metrics = {
        "loss/clip_share": stat((too_low | too_high).float(), counted),
        "loss/clip_low_share": stat(too_low.float(), counted),
        "loss/clip_high_share": stat(too_high.float(), counted),
        "loss/ratio_mean": stat(ratios, counted),
        "loss/ratio_max": peak(ratios, counted),
    }
    if (correction := _correction(inputs)) is not None:
        per_token, weights = per_token * correction.weights.detach(), weights * correction.weights
        metrics["correction/weight_mean"] = stat(correction.weights, counted)
        metrics["correction/weight_ess"] = _share(correction.weights[counted])
        metrics["correction/masked_share"] = stat((~correction.keep).float(), counted)
    metrics["correction/ess"] = _share(weights[counted])
    if inputs.config.loss.kl_coef > 0 and inputs.reference_logprobs is not None:
        kl = kl_terms(inputs.logprobs, inputs.reference_logprobs, inputs.config.loss.kl_estimator)
        metrics["loss/kl"] = stat(kl.detach(), counted)
        per_token = per_token + inputs.config.loss.kl_coef * kl
    if inputs.entropies is not None:
        metrics["loss/entropy"] = stat(inputs.entropies, counted)
    # A sample taken out of the loss must stay out whatever its numbers are: 0 * NaN would not.
    loss = torch.where(counted, per_token * scale, 0.0).sum()
    value = float(loss.detach())
    metrics["loss/total"] = Stat(value, float(counted.sum()) / max(inputs.counts.tokens, 1))
    metrics.update(mismatch_metrics(inputs))
    return LossOutputs(loss, metrics)


# --------------------------------------------------------------------------------------------------------- metrics


def stat(values: Tensor, mask: Tensor) -> Stat:
    """Mean over mask."""
    kept = values[mask].double()
    return Stat(float(kept.sum()), float(kept.numel()), float(kept.max()) if kept.numel() else float("-inf"))


def peak(values: Tensor, mask: Tensor) -> Stat:
    """Largest value over mask: read `maximum` (names that end in `_max`)."""
    kept = values[mask]
    return Stat(float(kept.max()), 1.0, float(kept.max())) if kept.numel() else Stat(0.0, 0.0)


def _share(weights: Tensor) -> Stat:
    """Effective share of [n] weights, so that micro-batches average by their size."""
    n = float(weights.numel())
    return Stat(effective_sample_share(weights) * n, n)


def effective_sample_share(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all weights are equal, 1/n when one has it all; 1 for no weight at all."""
    squares = weights.square().sum()
    if weights.numel() == 0 or squares == 0:
        return 1.0
    return float(weights.sum().square() / (weights.numel() * squares))


def mismatch_metrics(inputs: LossInputs) -> Metrics:
    """How far the trainer's log-probabilities are from the engine's, for samples of one version and of several apart."""
    trainer = inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    difference = trainer - inputs.behavior_logprobs
    n_samples = len(inputs.sample_weights)
    low = torch.full((n_samples,), torch.iinfo(torch.int64).max, device=difference.device)
    low.scatter_reduce_(0, inputs.samples, inputs.versions, "amin")
    high = torch.full((n_samples,), torch.iinfo(torch.int64).min, device=difference.device)
    high.scatter_reduce_(0, inputs.samples, inputs.versions, "amax")
    mixed = (low < high)[inputs.samples]
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.exp(bounded) - 1 - bounded
    metrics: Metrics = {}
    for prefix, mask in (("mismatch", ~mixed), ("mismatch/mixed", mixed)):
        metrics[f"{prefix}/logprob_diff_mean"] = stat(difference.abs(), mask)
        metrics[f"{prefix}/logprob_diff_max"] = peak(difference.abs(), mask)
        metrics[f"{prefix}/k3"] = stat(k3, mask)
    metrics["mismatch/mixed_share"] = stat(mixed.float(), torch.ones_like(mixed))
    return metrics


# ------------------------------------------------------------------------------------------------- steps of control


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLossInputs:
    """One minibatch of control steps, flat.

    logprobs, entropies: [M] under the current policy, with gradient; values: [M] in the units of the value head
    behavior_logprobs, advantages, targets: [M]; old_values: [M] before the first update, when values are clipped
    weights: [M] 0 for a row that is no step, else 1; count: valid rows of the whole minibatch that these are a part of
    """

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    targets: Tensor
    old_values: Tensor | None
    weights: Tensor
    count: Tensor


def step_loss(inputs: StepLossInputs, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """This part's share of the means over the minibatch's valid rows, and scalars that tell how the update went: they add up
    over parts, but for the largest ratio.

    ppo and appo: -min(r A, clip(r) A); impala: -A log p, where A holds the importance weight already.
    Schulman et al. 2017, arXiv:1707.06347; Espeholt et al. 2018, arXiv:1802.01561.
    """
    weights, count = inputs.weights, inputs.count.clamp(min=1.0)
    # What a row that is no step holds must not matter, not even when it is not finite: 0 * inf would.
    valid = weights > 0
    logprobs, advantages = (torch.where(valid, array, 0.0) for array in (inputs.logprobs, inputs.advantages))
    log_ratios = torch.where(valid, logprobs - inputs.behavior_logprobs, 0.0)
    ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.kind == "impala":
        policy = -advantages * logprobs
        outside = torch.zeros_like(weights)
    else:
        bounded = ratios.clamp(1 - config.clip, 1 + config.clip)
        policy = -torch.minimum(ratios * advantages, bounded * advantages)
        outside = (ratios.detach() != bounded.detach()).float()
    policy_loss = policy.sum() / count
    value_loss = (value_errors(inputs.values, inputs.targets, inputs.old_values, config.value_clip) * weights).sum()
    value_loss = value_loss / count
    entropy = (inputs.entropies * weights).sum() / count
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        kl = ((ratios - 1 - log_ratios) * weights).sum() / count
        metrics = {
            "loss/total": loss.detach(),
            "loss/policy": policy_loss.detach(),
            "loss/value": value_loss.detach(),
            "loss/entropy": entropy.detach(),
            "loss/kl": kl,
            "loss/clip_share": (outside * weights).sum() / count,
            "loss/ratio_max": (ratios * weights).max(),
        }
    return loss, metrics


def value_errors(values: Tensor, targets: Tensor, old_values: Tensor | None, clip: float) -> Tensor:
    """[M] half the squared error; with a clip, the larger one of the value's and of the value held within `clip` of its
    old one, so that a move beyond it is no gain."""
    errors = (values - targets).square()
    if clip > 0 and old_values is not None:
        held = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (held - targets).square())
    return 0.5 * errors
