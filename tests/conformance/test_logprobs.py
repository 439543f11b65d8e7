"""Faults of log-probabilities and ratios that users have met, reduced to small numbers (L1-L4)."""

import asyncio
import math

import numpy as np
import pytest
import torch

from headrace.training.backends.single_device import build_single_device
from headrace.training.batching import make_batches
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.logprobs import Head, logit_rows, target_logprobs
from headrace.training.losses import loss_function
from training.helpers import context, group_of, padded_logprobs, random_group, sample_of, samples_in, save_tiny
from training.test_losses import config_of, inputs_of


def test_temperature_divides_the_logits():
    """L1: logits [2, 0], token 0, temperature 0.5; and a neighbour at temperature 1 keeps its own."""
    samples = [sample_of([1], [0], temperature=t, logprobs=[lp]) for t, lp in ((0.5, -0.01815), (1.0, -0.12693))]
    ((batch,),) = make_batches([group_of(samples, [0.0, 1.0])], [np.ones(2)], TrainingConfig(), max_length=4)
    hidden, head = torch.ones(len(batch.token_ids), 1), Head(torch.tensor([[2.0], [0.0]]))
    found, _ = target_logprobs(hidden, head, logit_rows(batch), chunk=8)
    assert found.tolist() == pytest.approx([-0.01815, -0.12693], abs=1e-5)
    ratios = (found - torch.from_numpy(batch.behavior_logprobs)).exp()
    assert ratios.tolist() == pytest.approx([1, 1], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_learning_rate_of_zero_leaves_every_ratio_at_one(tmp_path, temperature):
    """L2: one sample or eight, padded left or right, packed or with a shared prefix, before and after an update."""
    torch.set_num_threads(1)
    folder = save_tiny(tmp_path / "model")
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}", size=4, multi_turn=i == 1, temperature=temperature) for i in range(2)]
    credit = [rng.normal(size=4) for _ in groups]
    config = TrainingConfig(optimizer=OptimizerConfig(lr=0.0))
    trainer = build_single_device(context(), config, folder, "float32", None, 8)
    before = asyncio.run(trainer.fingerprint())

    def packed(micro_tokens, share_prefix):
        cut = TrainingConfig(micro_tokens=micro_tokens)
        (micros,) = make_batches(groups, credit, cut, max_length=8, share_prefix=share_prefix)
        found = {}
        for batch in micros:
            filled = asyncio.run(trainer.annotate(batch, ["proximal"]))
            for i, name in enumerate(batch.sample_ids):
                found[name] = filled.proximal_logprobs[batch.target_samples == i]
        return np.concatenate([found[s.sample_id] for s in samples_in(groups)]), micros

    one_by_one, _ = packed(1, True)
    variants = [packed(4096, False)[0], packed(4096, True)[0], packed(24, True)[0]]
    model = trainer._policy.model
    with torch.no_grad():
        for side in ("left", "right"):
            variants.append(torch.cat(padded_logprobs(model, samples_in(groups), side)).numpy())
    for batch in packed(4096, True)[1]:
        asyncio.run(trainer.forward_backward(batch))
    assert asyncio.run(trainer.optimizer_step())["optimizer/grad_norm"].mean > 0
    assert asyncio.run(trainer.fingerprint()) == before
    variants.append(packed(4096, True)[0])
    for other in variants:
        assert np.abs(other - one_by_one).max() < 1e-5


@pytest.mark.parametrize("junk", [1.0, float("nan"), float("-inf")])
def test_what_stands_at_masked_positions_is_never_read(tmp_path, junk):
    """L3"""
    torch.set_num_threads(1)
    folder = save_tiny(tmp_path / "model")
    results = []
    for filler in (0.0, junk):
        base = sample_of([5, 6, 7], [8, 9, 10, 11], mask=[1, 0, 0, 1], logprobs=[-3.0, 0, 0, -2.0])
        values = base.behavior_logprobs.copy()
        values[base.loss_mask == 0] = filler
        import dataclasses

        sample = dataclasses.replace(base, behavior_logprobs=values)
        trainer = build_single_device(context(), TrainingConfig(), folder, "float32", None, 8)
        ((batch,),) = make_batches([group_of([sample], [1.0])], [np.ones(1)], TrainingConfig(), max_length=8)
        metrics = asyncio.run(trainer.forward_backward(batch))
        results.append((metrics["loss/total"].mean, trainer._flat.grads.clone()))
    assert math.isfinite(results[0][0]) and results[0][0] == results[1][0]
    assert torch.isfinite(results[0][1]).all() and torch.equal(results[0][1], results[1][1])


def test_the_ratio_is_against_the_behaviour_policy():
    """L4: behaviour -1.0, current -0.5; a ratio against a detached copy would be 1."""
    out = loss_function(config_of())(inputs_of([-0.5], [-1.0], [1.0], config_of()))
    assert out.metrics["loss/ratio_max"].maximum == pytest.approx(1.6487, abs=1e-4)
    assert out.metrics["loss/ratio_mean"].mean == pytest.approx(1.6487, abs=1e-4)
