"""GAE and V-trace against rlax, on random paths with ends, cuts and rows that are no steps."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest
import rlax

from headrace.training.advantages import gae, vtrace

GAMMA, LAM = 0.97, 0.9


@dataclass
class Paths:
    """`T` rows of `N` environments, where a row after an end may be a reset row, as next-step autoreset makes them.

    What must not matter is NaN: everything in a row that is no step, and the truncation value of a row that was not cut.
    """

    rhos: np.ndarray
    rewards: np.ndarray
    values: np.ndarray
    bootstrap: np.ndarray
    discounts: np.ndarray
    truncated: np.ndarray
    truncation_values: np.ndarray
    valid: np.ndarray

    @classmethod
    def random(cls, seed: int, steps: int = 9, envs: int = 5) -> Paths:
        rng = np.random.default_rng(seed)
        shape = (steps, envs)
        terminated = rng.random(shape) < 0.15
        truncated = (rng.random(shape) < 0.15) & ~terminated
        valid = np.ones(shape, dtype=bool)
        has_reset_rows = rng.random(envs) < 0.5
        for t in range(1, steps):
            valid[t] = ~(has_reset_rows & valid[t - 1] & (terminated | truncated)[t - 1])
        terminated, truncated = terminated & valid, truncated & valid
        return cls(
            rhos=np.where(valid, np.exp(rng.normal(size=shape)), np.nan),
            rewards=np.where(valid, rng.normal(size=shape), np.nan),
            values=np.where(valid, rng.normal(size=shape), np.nan),
            bootstrap=rng.normal(size=envs),
            discounts=np.where(terminated, 0.0, GAMMA),
            truncated=truncated,
            truncation_values=np.where(truncated, rng.normal(size=shape), np.nan),
            valid=valid,
        )

    def segments(self):
        """(environment, its rows, V of the state after the last of them): one for each piece without a cut or an end."""
        for n in range(self.valid.shape[1]):
            rows = []
            for t in range(len(self.valid)):
                if not self.valid[t, n]:
                    continue
                rows.append(t)
                if self.truncated[t, n]:
                    yield n, rows, self.truncation_values[t, n]
                    rows = []
                elif self.discounts[t, n] == 0:
                    yield n, rows, 0.0
                    rows = []
            if rows:
                yield n, rows, self.bootstrap[n]

    def by_pieces(self, rule):
        """What `rule` says of each piece alone, put together again: [T, N] advantages and targets, 0 elsewhere."""
        advantages, targets = np.zeros(self.valid.shape), np.zeros(self.valid.shape)
        with jax.enable_x64(True), jax.disable_jit():
            for n, rows, after in self.segments():
                at = (rows, [n] * len(rows))
                values = np.append(self.values[at], after)
                advantages[at], targets[at] = rule(self.rhos[at], self.rewards[at], values, self.discounts[at])
        return advantages, targets


def rlax_gae(rhos, rewards, values, discounts):
    found = np.asarray(rlax.truncated_generalized_advantage_estimation(rewards, discounts, LAM, values))
    return found, found + values[:-1]


def rlax_vtrace(clip, lam):
    def rule(rhos, rewards, values, discounts):
        found = rlax.vtrace_td_error_and_advantage(
            values[:-1],
            values[1:],
            rewards,
            discounts,
            rhos,
            lambda_=lam,
            clip_rho_threshold=clip,
            clip_pg_rho_threshold=clip,
        )
        return np.asarray(found.pg_advantage), np.asarray(found.errors) + values[:-1]

    return rule


@pytest.mark.parametrize("seed", range(6))
def test_gae_equals_rlax_on_each_piece(seed):
    paths = Paths.random(seed)
    advantages, targets = paths.by_pieces(rlax_gae)
    found = gae(
        paths.rewards,
        paths.values,
        paths.bootstrap,
        paths.discounts,
        LAM,
        paths.truncated,
        paths.truncation_values,
        paths.valid,
    )
    np.testing.assert_allclose(found.advantages, advantages, atol=1e-9)
    np.testing.assert_allclose(found.targets, targets, atol=1e-9)


@pytest.mark.parametrize("lam", [1.0, 0.9])
@pytest.mark.parametrize("clip", [1.0, 2.5])
@pytest.mark.parametrize("seed", range(4))
def test_vtrace_equals_rlax_on_each_piece(seed, clip, lam):
    paths = Paths.random(seed)
    advantages, targets = paths.by_pieces(rlax_vtrace(clip, lam))
    found = vtrace(
        paths.rhos,
        paths.rewards,
        paths.values,
        paths.bootstrap,
        paths.discounts,
        paths.truncated,
        paths.truncation_values,
        clip_rho=clip,
        valid=paths.valid,
        lam=lam,
    )
    np.testing.assert_allclose(found.advantages, advantages, atol=1e-9)
    np.testing.assert_allclose(found.targets, targets, atol=1e-9)


def test_the_random_paths_hold_what_the_tests_are_about():
    made = [Paths.random(seed) for seed in range(6)]
    cuts = sum(int(paths.truncated.sum()) for paths in made)
    ends = sum(int((paths.discounts == 0).sum()) for paths in made)
    assert cuts > 10 and ends > 10 and sum(int((~paths.valid).sum()) for paths in made) > 10
