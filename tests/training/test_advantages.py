"""Credit against hand-computed numbers."""

import numpy as np
import pytest

from headrace.errors import ConfigError, TrainingFailed
from headrace.training.advantages import gae, group_advantages, token_gae, vtrace, whiten
from headrace.training.config import AdvantageConfig
from training.helpers import group_of, sample_of


def groups_of(*rewards):
    return [group_of([sample_of([5, 6], [7, 8])] * len(r), r, f"g{i}") for i, r in enumerate(rewards)]


def test_grpo_divides_by_the_sample_deviation():
    (found,) = group_advantages(groups_of([0.0, 1.0, 2.0]), AdvantageConfig(kind="grpo", eps=1e-6))
    np.testing.assert_allclose(found, [-1, 0, 1], atol=2e-6)


def test_dr_grpo_only_centres():
    (found,) = group_advantages(groups_of([0.0, 1.0, 2.0, 5.0]), AdvantageConfig(kind="dr_grpo"))
    np.testing.assert_allclose(found, [-2, -1, 0, 3])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "leave_one_out"])
@pytest.mark.parametrize("value", [0.0, 0.1 + 0.2, 0.95, -1e6])
def test_equal_rewards_give_exactly_zero(kind, value):
    (found,) = group_advantages(groups_of([value] * 7), AdvantageConfig(kind=kind))
    assert (found == 0).all()


def test_rewards_apart_by_rounding_only_count_as_equal():
    (found,) = group_advantages(groups_of([0.3, 0.1 + 0.2, 0.3]), AdvantageConfig(kind="leave_one_out"))
    assert (found == 0).all()


def test_nan_and_infinite_rewards_are_left_out_like_none():
    (found,) = group_advantages(groups_of([0.0, float("nan"), 2.0, float("inf")]), AdvantageConfig(kind="dr_grpo"))
    np.testing.assert_array_equal(found, [-1, np.nan, 1, np.nan])


def by_half(rewards, config):
    return rewards / 2


def test_a_function_of_the_user_replaces_the_rule():
    (found,) = group_advantages(groups_of([2.0, 4.0]), AdvantageConfig(function=f"{__name__}:by_half"))
    np.testing.assert_allclose(found, [1, 2])
    with pytest.raises(ConfigError, match=r"training\.advantage\.function"):
        group_advantages(groups_of([2.0, 4.0]), AdvantageConfig(function="no.such.module:fn"))


def one_number(rewards, config):
    return 1.0


def not_a_number(rewards, config):
    return rewards * float("nan")


def raises(rewards, config):
    return 1 / 0


@pytest.mark.parametrize("name", ["one_number", "not_a_number", "raises"])
def test_a_rule_that_gives_no_credit_ends_the_run_in_one_line(name):
    """A single number would spread over the group, and NaN would leave samples out without a word."""
    with pytest.raises(TrainingFailed, match=f"training.advantage.function.*{name}") as caught:
        group_advantages(groups_of([2.0, 4.0]), AdvantageConfig(function=f"{__name__}:{name}"))
    assert "\n" not in str(caught.value)


def test_whitening_needs_two_different_values():
    np.testing.assert_array_equal(whiten(np.array([3.0, 9.0]), np.array([1, 0])), [3, 9])
    np.testing.assert_array_equal(whiten(np.array([3.0, 3.0]), np.array([1, 1])), [3, 3])
    found = whiten(np.array([1.0, 2.0, 3.0, 99.0]), np.array([1, 1, 1, 0]))
    np.testing.assert_allclose(found, [-1, 0, 1, 99], atol=1e-7)


def test_gae_by_hand():
    # d1 = 2 + .5*4 - 3 = 1; d0 = 1 + .5*3 - 2 = .5; A1 = 1; A0 = .5 + .5*.8*1 = .9
    credit = gae(np.array([1.0, 2.0]), np.array([2.0, 3.0]), 4.0, np.array([0.5, 0.5]), 0.8)
    np.testing.assert_allclose(credit.advantages, [0.9, 1.0])
    np.testing.assert_allclose(credit.targets, [2.9, 4.0])


def test_gae_stops_at_a_termination():
    credit = gae(np.array([1.0, 2.0]), np.array([2.0, 3.0]), 4.0, np.array([0.0, 0.5]), 0.8)
    np.testing.assert_allclose(credit.advantages, [-1.0, 1.0])


def test_gae_at_a_time_out_bootstraps_from_the_final_observation():
    """C4's number: V of the true final observation, 10, not of the state before it."""
    credit = gae(
        np.zeros((2, 1)),
        np.array([[0.0], [5.0]]),
        np.array([7.0]),
        np.full((2, 1), 0.99),
        0.95,
        truncated=np.array([[True], [False]]),
        truncation_values=np.array([[10.0], [0.0]]),
    )
    np.testing.assert_allclose(credit.advantages[0], [9.9])


def test_token_gae_passes_over_tool_tokens():
    """N7: mask [1,0,0,1] gives the GAE of the two-token sequence."""
    mask = np.array([1, 0, 0, 1])
    rewards, values = np.array([0.5, 0, 0, 1.0]), np.array([0.2, 77.0, -3.0, 0.4])
    whole = token_gae(rewards, values, mask, 0.9, 0.8)
    short = gae(np.array([0.5, 1.0]), np.array([0.2, 0.4]), 0.0, np.full(2, 0.9), 0.8)
    np.testing.assert_allclose(whole.advantages[[0, 3]], short.advantages)
    assert (whole.advantages[[1, 2]] == 0).all()


def test_a_reward_on_a_masked_token_moves_to_the_last_sampled_one():
    mask, values = np.array([1, 1, 0]), np.zeros(3)
    moved = token_gae(np.array([0, 0, 1.0]), values, mask, 1.0, 1.0)
    plain = token_gae(np.array([0, 1.0, 0]), values, mask, 1.0, 1.0)
    np.testing.assert_allclose(moved.advantages, plain.advantages)
    np.testing.assert_allclose(moved.advantages, [1, 1, 0])


def test_token_gae_without_any_sampled_token_is_zero():
    credit = token_gae(np.ones(3), np.ones(3), np.zeros(3), 0.9, 0.9)
    assert (credit.advantages == 0).all() and (credit.targets == 0).all()


def test_vtrace_by_hand():
    """C1."""
    credit = vtrace(np.array([2.0, 0.5]), np.ones(2), np.full(2, 0.5), 0.5, np.full(2, 0.9))
    np.testing.assert_allclose(credit.targets, [1.8775, 0.975])
    np.testing.assert_allclose(credit.advantages, [1.3775, 0.475])


def test_vtrace_does_not_look_past_a_truncation():
    """C2: V_A = 1, the next path's V is 100, A cut with its own bootstrap 1: advantage 0, not 99."""
    credit = vtrace(
        np.ones(2),
        np.zeros(2),
        np.array([1.0, 100.0]),
        100.0,
        np.ones(2),
        truncated=np.array([True, False]),
        truncation_values=np.array([1.0, 0.0]),
    )
    np.testing.assert_allclose(credit.advantages, [0, 0])
    np.testing.assert_allclose(credit.targets, [1, 100])


@pytest.mark.parametrize("lam", [1.0, 0.8])
def test_on_policy_vtrace_is_gae(lam):
    rng = np.random.default_rng(0)
    rewards, values, bootstrap = rng.normal(size=(6, 3)), rng.normal(size=(6, 3)), rng.normal(size=3)
    discounts = 0.9 * (rng.random((6, 3)) > 0.2)
    v = vtrace(np.ones((6, 3)), rewards, values, bootstrap, discounts, lam=lam)
    g = gae(rewards, values, bootstrap, discounts, lam)
    np.testing.assert_allclose(v.targets, g.targets)
    np.testing.assert_allclose(v.advantages, g.advantages)
