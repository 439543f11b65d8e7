"""Distributions against torch's own, and their samples against their log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution

from headrace.errors import ConfigError
from headrace.policies.distributions import distribution_of
from headrace.policies.spaces import ActionSpec

DISCRETE = ActionSpec("discrete", (), (4,), (3,))
SEVERAL = ActionSpec("discrete", (2,), (2, 3), (0, 5))
BOX = ActionSpec("box", (2,), low=(-2.0, -1.0), high=(2.0, 1.0), dtype="float32")


def drawn(spec, squash=False, rows=20_000, seed=0):
    distribution = distribution_of(spec, squash)
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(distribution.size, generator=generator).expand(rows, -1)
    return distribution, outputs, distribution.sample(outputs, distribution.noise((rows,), generator))


def test_a_whole_number_is_drawn_as_often_as_its_probability_says():
    distribution, outputs, actions = drawn(DISCRETE)
    reference = Categorical(logits=outputs)
    counts = torch.bincount(actions, minlength=4) / len(actions)
    torch.testing.assert_close(counts, reference.probs[0], atol=0.01, rtol=0)
    logs, entropy = distribution.logprobs_and_entropy(outputs, actions)
    torch.testing.assert_close(logs, reference.log_prob(actions))
    torch.testing.assert_close(entropy, reference.entropy())
    torch.testing.assert_close(distribution.logprobs(outputs, actions), logs)
    assert set(distribution.to_environment(actions.numpy())) <= {3, 4, 5, 6}
    assert int(distribution.mode(outputs)[0]) == int(outputs[0].argmax())


def test_several_whole_numbers_are_independent():
    distribution, outputs, actions = drawn(SEVERAL)
    parts = [Categorical(logits=outputs[:, :2]), Categorical(logits=outputs[:, 2:])]
    logs, entropy = distribution.logprobs_and_entropy(outputs, actions)
    torch.testing.assert_close(logs, sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts)))
    torch.testing.assert_close(entropy, sum(p.entropy() for p in parts))
    for i, part in enumerate(parts):
        counts = torch.bincount(actions[:, i]) / len(actions)
        torch.testing.assert_close(counts, part.probs[0], atol=0.01, rtol=0)
    given = distribution.to_environment(actions.numpy())
    assert given[:, 1].min() >= 5 and given.shape == (len(actions), 2)


def test_a_clipped_normal_keeps_what_was_drawn():
    distribution, outputs, actions = drawn(BOX)
    reference = Independent(Normal(outputs[:, :2], outputs[:, 2:].exp()), 1)
    logs, entropy = distribution.logprobs_and_entropy(outputs, actions)
    torch.testing.assert_close(logs, reference.log_prob(actions))
    torch.testing.assert_close(entropy, reference.entropy())
    torch.testing.assert_close(actions.mean(0), outputs[0, :2], atol=0.1, rtol=0)
    given = distribution.to_environment(actions.numpy())
    assert given.dtype == np.float32 and (np.abs(given) <= [2, 1]).all() and np.abs(actions.numpy()).max() > 2


def test_a_squashed_normal_has_the_change_of_variables_in_it():
    distribution, outputs, actions = drawn(BOX, squash=True)
    near = actions.abs().amax(1) < 3  # beyond, atanh(tanh(a)) has lost its digits
    base = Normal(outputs[near, :2], outputs[near, 2:].exp())
    reference = Independent(TransformedDistribution(base, [TanhTransform(cache_size=1)]), 1)
    expected = reference.log_prob(torch.tanh(actions[near]))
    torch.testing.assert_close(distribution.logprobs(outputs, actions)[near], expected, atol=1e-3, rtol=1e-3)
    far = torch.tensor([[40.0, -40.0]])
    assert torch.isfinite(distribution.logprobs(outputs[:1], far)).all()
    np.testing.assert_allclose(distribution.to_environment(far.numpy()), [[2.0, -1.0]])
    with pytest.raises(ConfigError, match=r"policy\.squash"):
        distribution_of(ActionSpec("box", (1,), low=(-math.inf,), high=(1.0,), dtype="float32"), squash=True)
