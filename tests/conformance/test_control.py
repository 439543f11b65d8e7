"""Cases C1 to C8: values, resets, time limits, actions, seeds and final observations of control."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.policies.config import PolicyConfig
from headrace.policies.distributions import distribution_of
from headrace.policies.spaces import ActionSpec
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment
from headrace.training.advantages import gae, vtrace
from headrace.training.steps import step_batch
from headrace.types import Trajectory
from rollout.control_helpers import ENVS, actor, collect, transitions


def test_c1_vtrace_by_hand():
    credit = vtrace(np.array([2.0, 0.5]), np.ones(2), np.full(2, 0.5), 0.5, np.full(2, 0.9))
    np.testing.assert_allclose(credit.targets, [1.8775, 0.975])
    np.testing.assert_allclose(credit.advantages, [1.3775, 0.475])


def test_c2_two_trajectories_joined_do_not_see_each_other():
    cut, after = np.array([True, False]), np.array([1.0, 100.0])
    credit = gae(np.zeros(2), np.array([1.0, 100.0]), 100.0, np.ones(2), 1.0, truncated=cut, truncation_values=after)
    assert credit.advantages[0] == 0.0


async def test_c3_next_step_autoreset_builds_no_transition_across_the_reset():
    (unit,) = await collect(actor("rows", steps=5))
    assert unit.valid[:, 0].tolist() == [True, True, False, True, True]
    assert transitions([unit], 0) == [
        (0.0, 1.0, 1.0, False, False), (1.0, 1.0, 2.0, True, False),
        (0.0, 1.0, 1.0, False, False), (1.0, 1.0, 2.0, True, False),
    ]  # fmt: skip
    assert unit.episode_lengths.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("same_step", [False, True])
async def test_c4_a_time_limit_bootstraps_from_the_observation_after_the_step(same_step):
    """V is 1 before the cut and 10 after it; gamma .99 makes +9.9 of it, wherever the mode shows the last observation."""
    backend = await value_is_first_number(gamma=0.99)
    shown = np.array([[1.0], [0.0 if same_step else 10.0], [0.0]], np.float32)[..., None]
    unit = one_environment(
        shown, rewards=[0, 0], truncated=[True, False], valid=[True, same_step],
        ended=[[0, 0]] if same_step else [], final=[[10.0]] if same_step else [],
    )  # fmt: skip
    filled = await backend.annotate(step_batch([unit], 0.99), ["values"])
    assert filled.values[0, 0] == 1.0
    assert filled.targets[0, 0] == pytest.approx(9.9)


async def test_c5_a_reward_at_the_last_step_reaches_the_learner():
    for autoreset in ("next_step", "same_step", "disabled"):
        (unit,) = await collect(actor("counter", autoreset=autoreset, steps=3))
        batch = step_batch([unit], 0.9)
        assert batch.rewards[:, 0].tolist() == [0, 0, 1] and batch.discounts[:, 0].tolist() == pytest.approx(
            [0.9, 0.9, 0]
        )
        credit = gae(batch.rewards, np.zeros((3, 2)), np.zeros(2), batch.discounts, 1.0)
        assert credit.targets[:, 0].tolist() == pytest.approx([0.81, 0.9, 1.0])


async def test_c6_the_sampled_actions_log_probability_is_kept_and_the_clipped_action_is_given():
    normal = distribution_of(ActionSpec("box", (1,), low=(-1.0,), high=(1.0,), dtype="float32"))
    outputs, action = torch.zeros(1, 2), normal.sample(torch.zeros(1, 2), torch.tensor([[2.5]]))
    assert action.item() == 2.5
    assert normal.logprobs(outputs, action).item() == pytest.approx(-4.0439, abs=1e-4)
    assert normal.to_environment(action.numpy()).item() == 1.0
    made = actor("counter", options={"box": True}, policy=PolicyConfig(log_std=1.0), steps=32)
    (unit,) = await collect(made)
    given = np.stack([env.unwrapped.given for env in made.environments.environments.envs], 1)
    assert np.abs(unit.actions).max() > 1 and np.abs(given).max() <= 1
    np.testing.assert_allclose(given, np.clip(unit.actions, -1, 1))


def test_c7_two_seeds_share_no_environment_seed():
    def seeds(seed: int, index: int = 0) -> set[int]:
        made = VectorEnvironment(EnvConfig(id=f"{ENVS}make_counter", count=4), seed=seed, index=index)
        made.reset()
        made.reset()
        return {s for env in made.environments.envs for s in env.unwrapped.seeds}

    parts = [seeds(0), seeds(1), seeds(0, 1)]
    assert [len(part) for part in parts] == [8, 8, 8] and len(set.union(*parts)) == 24
    assert seeds(0) == parts[0]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_c8_final_observations_are_the_true_ones_though_buffers_are_used_again(mode):
    made = actor("counter", mode=mode, autoreset="same_step", steps=9)
    (unit,) = await collect(made)
    await made.close()
    assert len(unit.ended) == 6
    np.testing.assert_array_equal(unit.final_observations["obs"][:, 1], 3)
    t, n = unit.ended.T
    np.testing.assert_array_equal(unit.observations["obs"][t + 1, n][:, 1], 0)


# ------------------------------------------------------------------------------------------------------------ helpers


def one_environment(shown, rewards, truncated, valid, ended, final) -> Trajectory:
    """A trajectory of one environment from lists over time."""
    column = lambda values, kind: np.array(values, kind)[:, None]  # noqa: E731
    return Trajectory(
        sample_id="0",
        observations={"obs": shown},
        actions=column([0] * len(rewards), np.int64),
        rewards=column(rewards, np.float32),
        terminated=column([False] * len(rewards), bool),
        truncated=column(truncated, bool),
        valid=column(valid, bool),
        behavior_logprobs=column([0.0] * len(rewards), np.float32),
        policy_versions=column([0] * len(rewards), np.int32),
        ended=np.array(ended, np.int64).reshape(-1, 2),
        final_observations={"obs": np.array(final, np.float32)} if final else {},
    )


async def value_is_first_number(gamma: float):
    """A trainer whose value function is the observation itself."""
    from headrace.policies.spaces import Leaf, Spaces
    from headrace.training.backends.control_device import build_control_device
    from headrace.training.config import AlgorithmConfig, TrainingConfig
    from training.helpers import context

    policy = PolicyConfig(hidden=(), shared="no")
    backend = build_control_device(
        context(None), TrainingConfig(), AlgorithmConfig(gamma=gamma, lam=0.5), policy, None, 0
    )
    await backend.begin(Spaces((Leaf("obs", "vector", (1,), "float32"),), ActionSpec("discrete", (), (2,), (0,))))
    with torch.no_grad():
        backend._network.value_head.weight.fill_(1.0)
    return backend
