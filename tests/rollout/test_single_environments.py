"""Our loop over single environments gives what Gymnasium's own gives, step by step, and what it takes off it makes up for."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, OrderEnforcing, PassiveEnvChecker, TimeLimit

from headrace.rollout.environments.gymnasium_vector import leaves_of, leaves_of_one
from headrace.rollout.environments.single_environments import SingleEnvironments
from rollout.control_envs import Everything


class Named(TimeLimit):
    """A user's own wrapper, which may do more than the class it is made from."""


def cartpole():
    return gymnasium.make("CartPole-v1", max_episode_steps=15)


def pendulum():
    return gymnasium.make("Pendulum-v1", max_episode_steps=7)


def stacked():
    return TimeLimit(FrameStackObservation(TimeLimit(cartpole(), 12), 3), 9)


def kept():
    return Named(gymnasium.make("CartPole-v1"), 11)


class Repeating(Everything):
    """Shows what its first seed decides."""

    def reset(self, *, seed=None, options=None):
        state = self.observation_space
        if seed is not None:
            state.seed(seed)
        super(Everything, self).reset(seed=seed)
        return state.sample(), {}


def everything():
    return TimeLimit(Repeating(), 6)


@pytest.mark.parametrize("make", [cartpole, pendulum, stacked, kept, everything])
def test_what_gymnasiums_own_loop_gives_step_by_step(make):
    count, rng = 5, np.random.default_rng(3)
    ours = SingleEnvironments([make] * count)
    theirs = SyncVectorEnv([make] * count, autoreset_mode=AutoresetMode.SAME_STEP)
    seeds = [11, 12, 13, 14, 15]
    same_leaves(ours.reset(seed=seeds)[0], theirs.reset(seed=seeds)[0])
    theirs.action_space.seed(1)
    ends = 0
    for _ in range(60):
        actions = theirs.action_space.sample()
        one, other = ours.step(actions), theirs.step(actions)
        same_leaves(one[0], other[0])
        for mine, yours in zip(one[1:4], other[1:4], strict=True):
            np.testing.assert_array_equal(mine, np.asarray(yours, mine.dtype))
        for n in np.flatnonzero(one[2] | one[3]):
            same_leaves(leaves_of_one(one[4]["final_obs"][n]), leaves_of_one(other[4]["final_obs"][n]))
            ends += 1
        if rng.random() < 0.05:
            seeds = [int(s) for s in rng.integers(1000, size=count)]
            same_leaves(ours.reset(seed=seeds)[0], theirs.reset(seed=seeds)[0])
    assert ends > 10
    ours.close()


def same_leaves(one, other):
    one, other = leaves_of(one), leaves_of(other)
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        assert leaf.dtype == other[name].dtype
        np.testing.assert_array_equal(leaf, other[name])


def test_only_the_very_classes_that_check_and_count_are_taken_off():
    def layers(make):
        environments = SingleEnvironments([make])
        return type(environments._steps[0].__self__), environments._limits[0]

    assert layers(cartpole) == (type(cartpole().unwrapped), 15)
    assert layers(stacked) == (FrameStackObservation, 9)
    assert layers(kept) == (Named, np.inf)
    assert layers(lambda: OrderEnforcing(PassiveEnvChecker(Everything()))) == (Everything, np.inf)


class Reused(gymnasium.Env):
    """Shows [episode, step], always in the same memory."""

    observation_space, action_space = spaces.Box(0, 100, (2,), np.float32), spaces.Discrete(2)

    def __init__(self):
        self.shown = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown[:] = self.shown[0] + 1, 0
        return self.shown, {}

    def step(self, action):
        self.shown[1] += 1
        return self.shown, 1.0, bool(self.shown[1] == 3), False, {}


def test_the_true_last_observation_of_an_environment_that_reuses_its_memory():
    made = SingleEnvironments([Reused] * 2)
    made.reset(seed=[1, 2])
    for _ in range(2):
        made.step(np.zeros(2, np.int64))
    shown, _, terminated, _, info = made.step(np.zeros(2, np.int64))
    assert terminated.all() and shown.tolist() == [[2, 0], [2, 0]]
    assert [one.tolist() for one in info["final_obs"]] == [[1, 3], [1, 3]]


class Wide(Reused):
    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}


def test_an_observation_of_another_shape_raises():
    made = SingleEnvironments([Reused, Wide])
    made.reset(seed=[1, 2])
    with pytest.raises(ValueError):
        made.step(np.zeros(2, np.int64))
