"""Faults of masks and of what a loss is divided by that users have met, reduced to small numbers (N1-N9)."""

import numpy as np
import pytest
import torch

from headrace.training.advantages import masked_mean, token_gae
from headrace.training.batching import make_batches
from headrace.training.config import LossConfig, TrainingConfig
from headrace.training.losses import LossInputs, loss_function
from headrace.training.metrics import batch_metrics
from headrace.training.policy import Policy, load_model
from training.helpers import group_of, random_group, sample_of, samples_in, save_tiny


def loss_of(batches, config):
    """The step's loss when the current policy is the behaviour policy: every token's loss is minus its advantage."""
    total = 0.0
    for batch in batches:
        logprobs = torch.from_numpy(np.nan_to_num(batch.behavior_logprobs)).requires_grad_()
        inputs = LossInputs(
            logprobs=logprobs,
            behavior_logprobs=torch.from_numpy(batch.behavior_logprobs),
            advantages=torch.from_numpy(batch.advantages),
            samples=torch.from_numpy(batch.target_samples),
            sample_weights=torch.from_numpy(batch.sample_weights),
            versions=torch.from_numpy(batch.target_versions),
            counts=batch.counts,
            config=config,
        )
        total += float(loss_function(config)(inputs).loss)
    return total


def pair(length_a, credit_a, length_b, credit_b, **more):
    """Two samples with given lengths and advantages (not a baseline's: the normaliser is what is tested)."""
    rng = np.random.default_rng(0)
    samples = [
        sample_of(rng.integers(3, 60, 4 + i), rng.integers(3, 60, n), sample_id=str(i), **more)
        for i, n in enumerate((length_a, length_b))
    ]
    return group_of(samples, [0.0, 1.0]), np.array([credit_a, credit_b])


@pytest.mark.parametrize("micro_tokens", [1, 10, 4096])
def test_token_mean_is_over_the_step_not_over_micro_batches(micro_tokens):
    """N1: 2 tokens of loss 1 and 8 of loss 0 make 0.2 in every split; 0.5 would be the mean of micro-batch means."""
    group, credit = pair(2, -1.0, 8, 0.0)
    config = TrainingConfig(micro_tokens=micro_tokens)
    (micros,) = make_batches([group], [credit], config, max_length=8)
    assert len(micros) == (1 if micro_tokens == 4096 else 2)
    assert loss_of(micros, config) == pytest.approx(0.2)


def test_a_masked_truncated_row_does_not_count():
    """N2: one of two rows masked leaves 1.0, not 0.5."""
    samples = [sample_of([5, 6], [7, 8, 9, 10], finish=finish) for finish in ("stop", "length")]
    group, credit = group_of(samples, [0.0, 1.0]), np.array([-1.0, -1.0])
    config = TrainingConfig(loss=LossConfig(mask_truncated=True))
    ((batch,),) = make_batches([group], [credit], config, max_length=4)
    assert batch.sample_weights.tolist() == [1.0, 0.0] and batch.counts.tokens == 4 and batch.counts.sequences == 1
    for normalise in ("token", "sequence", "constant"):
        config = TrainingConfig(loss=LossConfig(mask_truncated=True, normalise=normalise))
        assert loss_of([batch], config) == pytest.approx(1.0)


def test_all_rows_masked_is_nothing_to_train_and_finite():
    """N2"""
    group = group_of([sample_of([5, 6], [7, 8], finish="length")] * 2, [0.0, 1.0])
    config = TrainingConfig(loss=LossConfig(mask_truncated=True))
    credit = [np.array([-1.0, 1.0])]
    assert make_batches([group], credit, config, max_length=4) == []
    metrics = batch_metrics([group], credit, config)
    assert metrics["batch/empty"].mean == 1 and metrics["batch/masked_sequences"].mean == 2


@pytest.mark.parametrize(("normalise", "right"), [("sequence", 0.0), ("token", 0.8182), ("constant", 0.45)])
def test_the_three_normalisers_are_three_numbers(normalise, right):
    """N3: lengths 10 (A = +1) and 100 (A = -1), L = 100."""
    group, credit = pair(10, 1.0, 100, -1.0)
    config = TrainingConfig(loss=LossConfig(normalise=normalise))
    ((batch,),) = make_batches([group], [credit], config, max_length=100)
    assert loss_of([batch], config) == pytest.approx(right, abs=1e-4)


def test_a_mean_of_advantages_is_over_valid_tokens():
    """N4"""
    advantages = np.array([[2.0, 2, 0, 0], [4, 4, 4, 4]])
    assert masked_mean(advantages, np.array([[1, 1, 0, 0], [1, 1, 1, 1]])) == pytest.approx(10 / 3)
    assert masked_mean(advantages, np.zeros((2, 4))) == 0.0


def test_a_sampled_end_token_is_trained_on_an_appended_one_is_not():
    """N5"""
    sampled = sample_of([5, 6], [7, 2], mask=[1, 1], logprobs=[-1.0, -0.5])
    appended = sample_of([5, 6], [7, 2], mask=[1, 0], logprobs=[-1.0, 0.0])
    group = group_of([sampled, appended], [1.0, 0.0])
    ((batch,),) = make_batches([group], [np.array([1.0, -1.0])], TrainingConfig(), max_length=4)
    assert batch.target_ids.tolist() == [7, 2, 7] and batch.target_samples.tolist() == [0, 0, 1]
    np.testing.assert_allclose(batch.behavior_logprobs, [-1, -0.5, -1])


def test_the_engines_finish_reason_says_what_is_truncated():
    """N6: replies that end on any of several end tokens are not truncated."""
    samples = [sample_of([5], [7, end], finish="stop") for end in (2, 3, 4)]
    metrics = batch_metrics([group_of(samples, [0.0, 1.0, 0.0])])
    assert metrics["length/truncated_share"].mean == 0 and metrics["finish/stop"].mean == 1
    metrics = batch_metrics([group_of([*samples, sample_of([5], [7, 9], finish="length")], [0.0, 1.0, 0.0, 0.0])])
    assert metrics["length/truncated_share"].mean == 0.25


def test_gae_does_not_run_through_tool_tokens():
    """N7: one step of discount between the two sampled tokens, and a masked last token's reward moves back."""
    credit = token_gae(np.array([0, 0, 0, 1.0]), np.zeros(4), np.array([1, 0, 0, 1]), 0.9, 1.0)
    np.testing.assert_allclose(credit.advantages, [0.9, 0, 0, 1.0])
    credit = token_gae(np.array([0, 0, 0, 1.0]), np.zeros(4), np.array([1, 1, 0, 0]), 0.9, 1.0)
    np.testing.assert_allclose(credit.advantages, [0.9, 1.0, 0, 0])


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    torch.set_num_threads(1)
    return Policy(load_model(save_tiny(tmp_path_factory.mktemp("model")), "float32"), logits_chunk=16)


def test_the_loss_mask_is_no_attention_mask(policy):
    """N8: the same tokens with another loss mask have the same log-probabilities where both are targets."""
    tokens = [7, 8, 9, 10, 11, 12]
    whole = group_of([sample_of([5, 6], tokens)], [1.0])
    tool = group_of([sample_of([5, 6], tokens, mask=[1, 0, 0, 1, 0, 1])], [1.0])
    found = []
    for group in (whole, tool):
        ((batch,),) = make_batches([group], [np.ones(1)], TrainingConfig(), max_length=8)
        with torch.no_grad():
            found.append(policy.logprobs(batch)[0])
    torch.testing.assert_close(found[0][[0, 3, 5]], found[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_every_split_into_micro_batches_gives_the_same_gradient(policy, normalise):
    """N9: 5 samples in micro-batches of 1, 2 and 5."""
    rng = np.random.default_rng(3)
    group = random_group(rng, size=5, prompt=4, longest=9, multi_turn=True)
    credit = [rng.normal(size=5)]
    gradients = []
    for micro_tokens in (1, 24, 4096):
        config = TrainingConfig(micro_tokens=micro_tokens, loss=LossConfig(normalise=normalise))
        (micros,) = make_batches([group], credit, config, max_length=16)
        policy.model.zero_grad()
        for batch in micros:
            logprobs, _ = policy.logprobs(batch)
            inputs = LossInputs(
                logprobs=logprobs,
                behavior_logprobs=torch.from_numpy(batch.behavior_logprobs),
                advantages=torch.from_numpy(batch.advantages),
                samples=torch.from_numpy(batch.target_samples),
                sample_weights=torch.from_numpy(batch.sample_weights),
                versions=torch.from_numpy(batch.target_versions),
                counts=batch.counts,
                config=config,
            )
            loss_function(config)(inputs).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
        assert sum(len(m.sample_ids) for m in micros) == len(samples_in([group]))
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5
