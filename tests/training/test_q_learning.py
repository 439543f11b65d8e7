"""DQN's and SAC's targets and losses against hand-computed numbers, rlax and torch's own distributions."""

import math

import jax
import numpy as np
import pytest
import rlax
import torch
from torch import tensor
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from headrace.training.q_learning import (
    follow,
    gaussian_logprobs,
    n_step_returns,
    q_loss,
    q_targets,
    soft_policy_loss,
    soft_q_targets,
    squash,
    squashed_gaussian,
    taken,
    temperature_loss,
    twin_q_loss,
)


def test_n_step_returns_stop_at_the_end_of_the_transition():
    # 1 + .5*2 + .25*4 = 3, discount .125; a transition cut after one step; one that terminated at its second
    rewards = tensor([[1.0, 2.0, 4.0], [3.0, float("nan"), 7.0], [1.0, 2.0, float("inf")]])
    returns, discounts = n_step_returns(rewards, tensor([3, 1, 2]), tensor([False, False, True]), 0.5)
    assert returns.tolist() == [3.0, 3.0, 2.0] and discounts.tolist() == [0.125, 0.5, 0.0]


def test_n_step_returns_refuse_other_shapes():
    with pytest.raises(ValueError, match=r"found \(3,\)"):
        n_step_returns(torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.bool), 0.9)


def test_double_q_lets_the_online_network_choose_and_the_target_network_judge():
    target, online = tensor([[1.0, 5.0], [2.0, 0.0]]), tensor([[3.0, 0.0], [4.0, 0.0]])
    returns, discounts = tensor([1.0, 1.0]), tensor([0.5, 0.0])
    assert q_targets(returns, discounts, target).tolist() == [3.5, 1.0]
    assert q_targets(returns, discounts, target, online).tolist() == [1.5, 1.0]


def test_the_errors_are_those_of_rlax():
    rng = np.random.default_rng(0)
    q, target, online = rng.normal(size=(3, 16, 4))
    rewards, discounts, actions = rng.normal(size=16), 0.9 * (rng.random(16) > 0.3), rng.integers(4, size=16)
    with jax.enable_x64(True):
        expected = jax.vmap(rlax.double_q_learning)(q, actions, rewards, discounts, target, online)
        plain = jax.vmap(rlax.q_learning)(q, actions, rewards, discounts, target)
    t = torch.from_numpy
    q_taken = taken(t(q), t(actions))
    double = q_targets(t(rewards), t(discounts), t(target), t(online))
    single = q_targets(t(rewards), t(discounts), t(target))
    np.testing.assert_allclose(q_loss(q_taken, double, torch.ones(16))[1], np.asarray(expected), atol=1e-9)
    np.testing.assert_allclose(q_loss(q_taken, single, torch.ones(16))[1], np.asarray(plain), atol=1e-9)


def test_n_step_returns_are_those_of_rlax():
    rng = np.random.default_rng(1)
    rewards, value, n = rng.normal(size=(8, 3)), rng.normal(size=8), 3
    returns, discounts = n_step_returns(
        torch.from_numpy(rewards), torch.full((8,), n), torch.zeros(8, dtype=torch.bool), 0.9
    )
    with jax.enable_x64(True):
        whole = [
            rlax.n_step_bootstrapped_returns(r, np.full(n, 0.9), np.append(np.zeros(n - 1), v), n)[0]
            for r, v in zip(rewards, value, strict=True)
        ]
    np.testing.assert_allclose(returns + discounts * torch.from_numpy(value), np.array(whole), atol=1e-9)


def test_the_weighted_huber_loss_by_hand():
    q = tensor([0.0, 0.0], requires_grad=True)
    loss, errors = q_loss(q, tensor([0.5, 3.0]), tensor([1.0, 0.5]), huber=1.0)
    assert loss.item() == pytest.approx((0.125 + 0.5 * 2.5) / 2)
    loss.backward()
    assert q.grad.tolist() == [-0.25, -0.25] and errors.tolist() == [0.5, 3.0]
    assert q_loss(q, tensor([0.5, 3.0]), torch.ones(2), math.inf)[0].item() == pytest.approx((0.125 + 4.5) / 2)


def test_targets_carry_no_gradient():
    q = tensor([[1.0, 2.0]], requires_grad=True)
    one = torch.ones(1)
    assert not q_targets(one, one, q, q).requires_grad
    assert not soft_q_targets(one, one, q[:, 0], q[:, 1], q[:, 0], one).requires_grad


def test_soft_targets_by_hand():
    # 1 + .9 (min(3, 2) - .5 * -2) = 3.7
    found = soft_q_targets(tensor([1.0]), tensor([0.9]), tensor([3.0]), tensor([2.0]), tensor([-2.0]), tensor(0.5))
    assert float(found) == pytest.approx(3.7)


def test_twin_losses_by_hand():
    q1, q2 = tensor([1.0], requires_grad=True), tensor([4.0], requires_grad=True)
    loss, errors = twin_q_loss(q1, q2, tensor([2.0]), torch.ones(1))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 + 2.0) and errors.tolist() == [1.5]
    assert q1.grad.tolist() == [-1.0] and q2.grad.tolist() == [2.0]


def test_the_policy_follows_the_smaller_q_and_its_entropy():
    logprobs, q1, q2 = tensor([-1.0, -3.0]), tensor([2.0, 5.0]), tensor([3.0, 1.0])
    assert float(soft_policy_loss(logprobs, q1, q2, tensor(0.5))) == pytest.approx((-0.5 - 2 - 1.5 - 1) / 2)


def test_the_temperature_grows_while_the_entropy_is_below_the_target():
    log_temperature = tensor(math.log(0.5), requires_grad=True)
    loss = temperature_loss(log_temperature, tensor([1.0, 3.0]), target_entropy=-1.0)
    loss.backward()  # entropy -2, target -1
    assert loss.item() == pytest.approx(-0.5) and float(log_temperature.grad) == pytest.approx(-0.5)
    log_temperature.grad = None
    temperature_loss(log_temperature, tensor([-1.0, -3.0]), target_entropy=-1.0).backward()
    assert float(log_temperature.grad) > 0


def test_the_squashed_gaussian_is_torchs():
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = torch.randn(3, 64, 2, generator=generator, dtype=torch.float64) * 0.7
    low, high = tensor([-2.0, 0.0]).double(), tensor([2.0, 5.0]).double()
    actions, logprobs = squashed_gaussian(mean, log_std, noise, low, high)
    base = Independent(Normal(mean, log_std.exp()), 1)
    bounds = AffineTransform((low + high) / 2, (high - low) / 2, event_dim=1)
    reference = TransformedDistribution(base, [TanhTransform(), bounds])
    torch.testing.assert_close(logprobs, reference.log_prob(actions), atol=1e-6, rtol=1e-6)
    assert (actions >= low).all() and (actions <= high).all()


def test_the_log_density_is_finite_where_tanh_is_one():
    """C6's kind: what counts is the density of the raw action that was drawn."""
    mean = torch.full((1, 1), 30.0, requires_grad=True)
    actions, logprobs = squashed_gaussian(mean, torch.zeros(1, 1), torch.zeros(1, 1), tensor([-1.0]), tensor([1.0]))
    logprobs.sum().backward()
    assert actions.item() == 1.0
    assert logprobs.item() == pytest.approx(-math.log(2 * math.pi) / 2 - 2 * (math.log(2) - 30), rel=1e-6)
    assert mean.grad.item() == pytest.approx(2.0)


def test_gaussian_log_density_by_hand():
    # C6: N(0, 1) at 2.5
    assert gaussian_logprobs(tensor([2.5]), tensor([0.0]), tensor([0.0])).item() == pytest.approx(-4.0439, abs=1e-4)
    assert squash(tensor([0.0]), tensor([-1.0]), tensor([3.0])).item() == 1.0


def test_the_target_network_follows():
    target, online = [tensor([0.0, 4.0])], [tensor([1.0, 0.0])]
    follow(target, online, 0.25)
    assert target[0].tolist() == [0.25, 3.0]
    follow(target, online, 1.0)
    assert target[0].tolist() == [1.0, 0.0] and online[0].tolist() == [1.0, 0.0]
