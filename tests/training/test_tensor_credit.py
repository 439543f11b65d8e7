"""Credit on tensors against the same on arrays, which is held to rlax."""

import numpy as np
import pytest
import torch

from headrace.training.advantages import gae, vtrace
from headrace.training.tensor_credit import gae_tensors, vtrace_tensors
from training.test_credit_reference import GAMMA, LAM, Paths


def tensors(paths):
    """V of the state that each step led to, and what both forms take."""
    following = np.concatenate([paths.values[1:], paths.bootstrap[None]])
    following = np.where(paths.truncated, paths.truncation_values, following)
    return [
        torch.from_numpy(part)
        for part in (paths.rewards, paths.values, following, paths.discounts, paths.truncated, paths.rhos)
    ]


def without_reset_rows(seed):
    paths = Paths.random(seed, steps=12, envs=6)
    for name in ("rewards", "values", "rhos"):
        array = getattr(paths, name)
        array[~paths.valid] = 0.5  # resets are done in the step that ends an episode: every row is a step
    paths.valid[:] = True
    return paths


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_that_of_arrays(seed):
    paths = without_reset_rows(seed)
    expected = gae(paths.rewards, paths.values, paths.bootstrap, paths.discounts, LAM, paths.truncated, paths.truncation_values)  # fmt: skip
    rewards, values, following, discounts, cut, _ = tensors(paths)
    advantages, targets = gae_tensors(rewards, values, following, discounts, LAM, cut)
    np.testing.assert_allclose(advantages, expected.advantages, atol=1e-12)
    np.testing.assert_allclose(targets, expected.targets, atol=1e-12)
    assert paths.truncated.any() and (paths.discounts != GAMMA).any()


@pytest.mark.parametrize("clip_rho, clip_c, lam, weighted", [(1.0, 1.0, 1.0, True), (2.0, 0.7, 0.9, False)])
@pytest.mark.parametrize("seed", range(5))
def test_vtrace_is_that_of_arrays(seed, clip_rho, clip_c, lam, weighted):
    paths = without_reset_rows(seed)
    expected = vtrace(
        paths.rhos, paths.rewards, paths.values, paths.bootstrap, paths.discounts, paths.truncated,
        paths.truncation_values, clip_rho, clip_c, lam=lam, weighted=weighted,
    )  # fmt: skip
    rewards, values, following, discounts, cut, rhos = tensors(paths)
    advantages, targets = vtrace_tensors(
        rhos, rewards, values, following, discounts, cut, clip_rho, clip_c, lam, weighted
    )
    np.testing.assert_allclose(advantages, expected.advantages, atol=1e-12)
    np.testing.assert_allclose(targets, expected.targets, atol=1e-12)
