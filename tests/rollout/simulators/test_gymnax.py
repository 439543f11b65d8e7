"""gymnax environments through dlpack; run where gymnax is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.rollout.environments.simulators import make_simulator, make_vector

pytest.importorskip("gymnax")


def test_steps_are_those_of_the_same_equations_in_torch():
    theirs = make_simulator("gymnax/CartPole-v1", 6, seeds=1)
    ours = make_simulator("CartPole-v1", 6, time_limit=0)
    shown, rng, ends = theirs.reset(), np.random.default_rng(0), 0
    assert shown.shape == (6, 4) and shown.unique(dim=0).shape[0] == 6
    for _ in range(60):
        ours.reset()
        ours.state.copy_(shown.T)
        actions = torch.from_numpy(rng.integers(2, size=6))
        step, expected = theirs.step(actions), ours.step(actions)
        torch.testing.assert_close(step.final_observations, expected.final_observations, atol=1e-5, rtol=1e-5)
        assert torch.equal(step.terminated, expected.terminated) and torch.equal(step.rewards, expected.rewards)
        going_on = ~step.terminated
        assert torch.equal(step.observations[going_on], step.final_observations[going_on])
        assert (step.observations[step.terminated].abs() <= 0.05).all()
        ends += int(step.terminated.sum())
        shown = step.observations
    assert ends > 0


def test_a_time_limit_truncates():
    made = make_simulator("gymnax/Pendulum-v1", 2, time_limit=3)
    assert made.actions.shape == (1,) and made.actions.high == (2.0,)
    made.reset()
    for t in range(1, 7):
        step = made.step(torch.zeros(2, 1))
        assert step.truncated.tolist() == [t % 3 == 0] * 2 and not step.terminated.any()


def test_seeds_decide_one_by_one_and_numpy_users_can_have_it():
    first = make_vector(3, "gymnax/CartPole-v1").reset(seed=[4, 5, 4])[0]
    assert (first[0] == first[2]).all() and (first[0] != first[1]).any() and first.dtype == np.float32
    assert (make_vector(3, "gymnax/CartPole-v1").reset(seed=[4, 5, 4])[0] == first).all()


def test_memory_is_shared():
    made = make_simulator("gymnax/CartPole-v1", 2)
    made.reset()
    seen = []
    step = made._step
    made._step = lambda *args: seen.append(step(*args)) or seen[-1]
    given = made.step(torch.tensor([0, 1]))
    assert given.observations.data_ptr() == seen[0][1][0].unsafe_buffer_pointer()
