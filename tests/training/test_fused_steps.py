"""The compiled gradient of control steps is that of the loss through autograd, and falls back where it would not be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import ActionSpec, Leaf, Spaces
from headrace.training.backends.control_device import ControlDevice
from headrace.training.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from training.helpers import context
from training.test_control_device import steps

SPACES = Spaces((Leaf("obs", "vector", (3,), "float32"),), ActionSpec("discrete", (), (2,), (0,)))
BOX = Spaces(SPACES.leaves, ActionSpec("box", (3,), low=(-1.0,) * 3, high=(2.0,) * 3, dtype="float32"))
NETWORKS = [
    PolicyConfig(hidden=(64,)),
    PolicyConfig(hidden=(32, 64), shared="yes"),
    PolicyConfig(hidden=(96, 32, 64), activation="relu"),
    PolicyConfig(hidden=(32,), normalise_observations=True),
]
DRAWING = [
    PolicyConfig(hidden=(64,)),
    PolicyConfig(hidden=(32,), shared="yes", squash=True, log_std=-0.7),
    PolicyConfig(hidden=(32,), log_std=2.1),
]
"""Of numbers: the last one's deviation is beyond its bound, and not learned."""
ALGORITHMS = [
    AlgorithmConfig(),
    AlgorithmConfig(kind="impala"),
    AlgorithmConfig(kind="appo", value_clip=0.1, entropy_coef=0.3, clip=0.01),
    AlgorithmConfig(normalise_advantages=False, normalise_returns=True, value_clip=0.05),
]


async def device(policy, algorithm, spaces=SPACES, threads=1, **training) -> ControlDevice:
    torch.set_num_threads(threads)
    config = TrainingConfig(optimizer=OptimizerConfig(lr=0.01), **training)
    made = ControlDevice(context(None), config, algorithm, policy, None, 0)
    await made.begin(spaces)
    torch.set_num_threads(1)
    return made


def drawn(batch, seed=0):
    """The same steps with numbers for actions, some far from the mean."""
    actions = np.random.default_rng(seed).normal(scale=1.5, size=(*batch.rewards.shape, 3)).astype(np.float32)
    return replace(batch, actions=actions, behavior_logprobs=batch.behavior_logprobs - 3.0)


def some_invalid(batch, seed=0):
    """Rows that are no step, and hold what no step could."""
    valid = np.random.default_rng(seed).random(batch.valid.shape) < 0.8
    spoilt = np.where(valid, batch.behavior_logprobs, np.nan)
    return replace(batch, valid=valid, behavior_logprobs=spoilt)


@pytest.mark.parametrize(("policy", "spaces"), [*((one, SPACES) for one in NETWORKS), *((one, BOX) for one in DRAWING)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rows", [(1, 2), (5, 6), (20, 130)])
async def test_updates_are_those_of_autograd(policy, spaces, algorithm, rows):
    """Several in a row, each from where the last one led, with rows that are no steps."""
    length, count = rows
    fused, plain = [await device(policy, algorithm, spaces, epochs=2, minibatches=2) for _ in range(2)]
    assert fused._fused is not None
    plain._fused = None
    for seed in range(2):
        batch = steps(seed, count, length)
        batch = drawn(batch, seed) if spaces is BOX else batch
        batch = some_invalid(batch) if seed and algorithm.kind == "ppo" else batch
        found, exact = await fused.update(batch), await plain.update(batch)
        assert set(found) == set(exact)
        for name, stat in exact.items():
            assert found[name].total == pytest.approx(stat.total, rel=2e-3, abs=2e-5), name
    torch.testing.assert_close(fused._flat.values, plain._flat.values, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("policy", "spaces"), [(NETWORKS[1], SPACES), *((one, BOX) for one in DRAWING)])
async def test_one_gradient_to_a_hundred_thousandth(algorithm, policy, spaces):
    fused, plain = [await device(policy, algorithm, spaces) for _ in range(2)]
    plain._fused = None
    gradients = []
    for made in (fused, plain):
        made._step = lambda made=made: gradients.append(made._flat.grads.clone()) or {}
        await made.update(drawn(steps(3, 50, 30)) if spaces is BOX else steps(3, 50, 30))
    off = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert off < 1e-5


async def test_one_update_equals_the_same_by_the_calls_of_every_backend():
    """And another batch after it, whose rows are not those of the first."""
    once, calls = [await device(NETWORKS[0], AlgorithmConfig()) for _ in range(2)]
    for seed in range(2):
        await once.update(steps(seed))
        await calls.forward_backward(await calls.annotate(steps(seed), ["values"]))
        await calls.optimizer_step()
        torch.testing.assert_close(once._flat.values, calls._flat.values, atol=1e-6, rtol=1e-5)


async def test_all_cores_give_the_same_gradient_again_and_again(monkeypatch):
    from headrace.training.backends import step_rows

    monkeypatch.setattr(step_rows, "ROWS_WORTH_A_CORE", 8)
    ends = []
    for threads in (1, 3, 3):
        made = await device(NETWORKS[0], AlgorithmConfig(), threads=threads, epochs=2, minibatches=2)
        await made.update(steps(1, 40, 20))
        ends.append(made._flat.values.clone())
    torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=1e-4)
    assert torch.equal(ends[1], ends[2])


@pytest.mark.parametrize("action", [-1, 2])
async def test_an_action_that_the_policy_does_not_have_is_refused_as_autograd_does(action):
    """The loops look at memory without a check of their own."""
    for fused in (True, False):
        made = await device(NETWORKS[0], AlgorithmConfig())
        made._fused = made._fused if fused else None
        batch = steps()
        batch.actions[2, 1] = action
        with pytest.raises((IndexError, RuntimeError)):
            await made.update(batch)


@pytest.mark.parametrize("spoilt", ["rewards", "behavior_logprobs"])
async def test_a_gradient_that_is_not_finite_changes_nothing(spoilt):
    made = await device(NETWORKS[0], AlgorithmConfig())
    before, batch = made._flat.values.clone(), steps()
    found = await made.update(replace(batch, **{spoilt: np.full_like(batch.rewards, np.nan)}))
    assert found["optimizer/skipped"].total == 1.0 and torch.equal(made._flat.values, before)


@pytest.mark.parametrize(
    ("policy", "action"),
    [
        (PolicyConfig(hidden=(50,)), SPACES.action),
        (PolicyConfig(hidden=(64,), activation="elu"), SPACES.action),
        (PolicyConfig(hidden=()), SPACES.action),
        (PolicyConfig(hidden=(64,), recurrent="gru"), SPACES.action),
        (PolicyConfig(hidden=(64,)), ActionSpec("multidiscrete", (2,), (2, 3), (0, 0))),
    ],
)
async def test_what_the_loops_do_not_compute_goes_through_autograd(policy, action):
    made = await device(policy, AlgorithmConfig(), Spaces(SPACES.leaves, action))
    assert made._fused is None


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("rows", [0, 1, 15, 300])
def test_layers_in_one_call_are_those_one_by_one(activation, rows):
    from headrace.policies.networks import layer
    from headrace.policies.tower import Tower

    torch.manual_seed(0)
    tower = Tower(layer(5, 64, 1.4, activation), layer(64, 32, 1.4, activation))
    assert tower.compiled
    with torch.no_grad(), pytest.raises(RuntimeError):
        tower(torch.zeros(2, 3))
    x = torch.randn(rows, 5) * 3
    exact = tower(x)
    assert exact.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(tower(x), exact, atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(tower(x.t().contiguous().t()), exact, atol=2e-6, rtol=2e-5)
        if rows:
            x[0, 0] = float("nan")
            assert not torch.isfinite(tower(x)[0]).any()


def test_a_head_that_learns_above_layers_that_do_not_keeps_its_gradient():
    from headrace.policies.networks import layer
    from headrace.policies.tower import Tower

    tower, head = Tower(layer(5, 64, 1.4, "tanh")).requires_grad_(False), layer(64, 3, 1.0)
    x = torch.randn(20, 5)
    made = tower.headed(x, head)
    assert made.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(tower.headed(x, head), made, atol=2e-6, rtol=2e-5)


async def test_numbers_drawn_for_another_policy_are_refused():
    made = await device(DRAWING[0], AlgorithmConfig(), BOX)
    batch = drawn(steps())
    with pytest.raises(ValueError, match=r"actions of shape \(2,\), and a policy of 3 numbers"):
        await made.update(replace(batch, actions=batch.actions[..., :2]))
