"""The trainer of steps: its loss by hand, its batches however they are cut, its credit with and without a memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

import headrace.training.backends.control_device as module
from headrace.policies.config import PolicyConfig
from headrace.policies.shared_pass import SharedPass
from headrace.policies.spaces import ActionSpec, Leaf, Spaces
from headrace.training.backends import step_rows
from headrace.training.backends.control_device import ControlDevice
from headrace.training.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from headrace.training.losses import StepLossInputs, step_loss, value_errors
from headrace.types import StepBatch
from training.helpers import context

SPACES = Spaces((Leaf("obs", "vector", (3,), "float32"),), ActionSpec("discrete", (), (2,), (0,)))


async def device(algorithm=AlgorithmConfig(), policy=PolicyConfig(hidden=(8,)), cores=1, **training) -> ControlDevice:
    torch.set_num_threads(cores)
    config = TrainingConfig(optimizer=OptimizerConfig(lr=0.01), **training)
    made = ControlDevice(context(None), config, algorithm, policy, None, 0)
    await made.begin(SPACES)
    return made


def acted_out(made: ControlDevice, batch: StepBatch) -> SharedPass:
    """The passes of all steps of a batch, as an actor in the trainer's process leaves them."""
    shared = made.shared = made.shared or SharedPass()
    shared.network = made._network
    shown = torch.from_numpy(batch.observations["obs"])
    shared.keep(
        shared.changes, [shared.evaluate({"obs": shown[t]}) for t in range(len(batch.rewards))], batch.behavior_logprobs
    )
    return shared


def steps(seed=0, count=6, length=5, valid=True, memory=0) -> StepBatch:
    rng = np.random.default_rng(seed)
    done = rng.random((length, count)) < 0.3
    cut = done & (rng.random((length, count)) < 0.5)
    return StepBatch(
        observations={"obs": rng.normal(size=(length + 1, count, 3)).astype(np.float32)},
        actions=rng.integers(2, size=(length, count)),
        rewards=rng.normal(size=(length, count)).astype(np.float32),
        discounts=np.where(done & ~cut, 0.0, 0.9).astype(np.float32),
        cut=cut,
        valid=np.full((length, count), valid),
        resets=np.vstack([np.zeros((1, count), bool), done[:-1]]),
        behavior_logprobs=np.full((length, count), -0.7, np.float32),
        policy_versions=np.zeros((length, count), np.int32),
        ended=np.argwhere(cut),
        final_observations={"obs": rng.normal(size=(int(cut.sum()), 3)).astype(np.float32)},
        initial_state={"h": rng.normal(size=(count, memory)).astype(np.float32)} if memory else None,
    )


def inputs(**changes) -> StepLossInputs:
    """Ratios 1.5, 0.5 and (a row that is no step) NaN; advantages 1, -2 and infinite."""
    values = {
        "logprobs": torch.tensor([np.log(1.5), np.log(0.5), np.nan], requires_grad=True),
        "entropies": torch.tensor([0.6, 0.4, 9.0]),
        "values": torch.tensor([1.0, 2.0, 5.0]),
        "behavior_logprobs": torch.zeros(3),
        "advantages": torch.tensor([1.0, -2.0, np.inf]),
        "targets": torch.tensor([2.0, 0.0, 0.0]),
        "old_values": None,
        "weights": torch.tensor([1.0, 1.0, 0.0]),
        "count": torch.tensor(2.0),
    }
    return StepLossInputs(**{**values, **changes})


def test_the_clipped_surrogate_by_hand():
    """-(min(1.5, 1.2) + min(-1, -1.6)) / 2 = 0.2; values (0.5 + 2) / 2; entropy 0.5."""
    config = AlgorithmConfig(kind="ppo", clip=0.2, value_coef=0.5, entropy_coef=0.1)
    loss, metrics = step_loss(inputs(), config)
    assert metrics["loss/policy"].item() == pytest.approx(0.2)
    assert metrics["loss/value"].item() == pytest.approx(1.25)
    assert loss.item() == pytest.approx(0.2 + 0.625 - 0.05)
    assert metrics["loss/clip_share"].item() == 1.0 and metrics["loss/ratio_max"].item() == pytest.approx(1.5)


def test_the_policy_gradient_by_hand_and_a_row_that_is_no_step_changes_nothing():
    found = inputs()
    loss, _ = step_loss(found, AlgorithmConfig(kind="impala", value_coef=0.0, entropy_coef=0.0))
    assert loss.item() == pytest.approx(-(np.log(1.5) - 2 * np.log(0.5)) / 2)
    loss.backward()
    assert found.logprobs.grad.tolist() == pytest.approx([-0.5, 1.0, 0.0])


def test_a_value_gains_nothing_by_moving_beyond_its_clip():
    values = torch.tensor([3.0, 0.9])
    errors = value_errors(values, torch.tensor([4.0, 4.0]), torch.tensor([0.0, 1.0]), 0.5)
    assert errors.tolist() == pytest.approx([0.5 * 3.5**2, 0.5 * 3.1**2])


async def test_running_figures_move_after_the_update_that_was_acted_under_them():
    made = await device(policy=PolicyConfig(hidden=(8,), normalise_observations=True))
    batch = steps()
    with torch.no_grad():
        made._network.policy_head.weight.mul_(100)
        outputs, _ = made._network.evaluate({"obs": torch.from_numpy(batch.observations["obs"][:-1]).flatten(0, 1)})
        logprobs = made._distribution.logprobs(outputs, torch.from_numpy(batch.actions).flatten()).view(5, 6).numpy()
    mean = made._network.encoder.leaves[0].normaliser.mean
    before = mean.clone()
    metrics = await made.update(replace(batch, behavior_logprobs=logprobs))
    assert metrics["loss/ratio_max"].mean == pytest.approx(1.0, abs=1e-5)
    assert not torch.equal(mean, before)


@pytest.mark.parametrize("kind", ["ppo", "appo", "impala"])
async def test_chunks_add_up_to_the_whole_gradient(kind, monkeypatch):
    results = []
    for rows in (7, 10_000):
        monkeypatch.setattr(step_rows, "CHUNK_ROWS", rows)
        made = await device(AlgorithmConfig(kind=kind))
        metrics = await made.update(steps())
        results.append((made._flat.values.clone(), {name: stat.mean for name, stat in metrics.items()}))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("shared", ["yes", "no"])
@pytest.mark.parametrize(("kept", "minibatches"), [(True, 1), (False, 1), (False, 3)])
async def test_shares_of_all_cores_add_up_to_the_same_gradient_again_and_again(monkeypatch, kept, shared, minibatches):
    monkeypatch.setattr(step_rows, "CHUNK_ROWS", 7)
    monkeypatch.setattr(step_rows, "ROWS_WORTH_A_CORE", 1)
    batch, results = steps(seed=3), []
    for cores in (1, 3, 3):
        made = await device(minibatches=minibatches, policy=PolicyConfig(hidden=(8,), shared=shared), cores=cores)
        assert made._cores == cores
        if kept:
            acted_out(made, batch)
        metrics = await made.update(batch)
        results.append((made._flat.values.clone(), {name: stat.mean for name, stat in metrics.items()}))
        torch.set_num_threads(1)
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4, abs=1e-6)
    assert torch.equal(results[1][0], results[2][0]), "shares are added up in their order"


class Dropping(torch.nn.Module):
    """A user's own network, which draws random numbers in its forward pass."""

    def __init__(self, leaves, outputs) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5))
        self.heads = torch.nn.Linear(8, outputs + 1)

    def forward(self, observations):
        found = self.heads(self.body(observations["obs"]))
        return found[:, :-1], found[:, -1]


async def test_a_users_network_is_never_run_by_two_threads_at_once(monkeypatch):
    monkeypatch.setattr(step_rows, "ROWS_WORTH_A_CORE", 1)
    made = await device(policy=PolicyConfig(network="training.test_control_device:Dropping"))
    torch.set_num_threads(3)
    threads, forward = set(), made._forward
    made._forward = lambda *given: (threads.add(threading.get_ident()), forward(*given))[1]
    await made.update(steps())
    torch.set_num_threads(1)
    assert threads == {threading.get_ident()}


async def test_one_update_equals_the_same_by_the_calls_of_every_backend():
    one, other = await device(), await device()
    await one.update(steps())
    await other.forward_backward(await other.annotate(steps(), ["values"]))
    await other.optimizer_step()
    torch.testing.assert_close(one._flat.values, other._flat.values)


async def test_the_ratio_stands_once_in_the_loss_in_impalas_advantages_or_in_appos_surrogate():
    batch = steps()
    apart = np.resize(np.float32([-0.2, 0.2]), batch.behavior_logprobs.shape)
    batch = replace(batch, behavior_logprobs=batch.behavior_logprobs + apart)
    impala, appo = [await device(AlgorithmConfig(kind=kind)) for kind in ("impala", "appo")]
    weighted, plain = await impala.annotate(batch, ["values"]), await appo.annotate(batch, ["values"])
    with torch.no_grad():
        logprobs, _, _ = appo._forward(step_rows.Rows(batch), slice(None))
    ratios = np.exp(logprobs.view(batch.rewards.shape).numpy() - batch.behavior_logprobs)
    assert (ratios > 1).any() and (ratios < 1).any()
    np.testing.assert_allclose(weighted.advantages, np.minimum(ratios, 1) * plain.advantages, atol=1e-6)
    np.testing.assert_allclose(weighted.targets, plain.targets, atol=1e-6)


async def test_minibatches_see_each_row_once_an_epoch():
    made = await device(epochs=2, minibatches=4)
    seen: list[int] = []
    forward = made._forward
    made._forward = lambda rows, part: (seen.extend(part.tolist()), forward(rows, part))[1]
    await made.update(steps())
    assert sorted(seen[:30]) == sorted(seen[30:]) == list(range(30)) and seen[:30] != seen[30:]


async def test_the_updates_stop_when_the_policy_is_too_far():
    made = await device(AlgorithmConfig(target_kl=2e-4), epochs=4, minibatches=2)
    metrics = await made.update(steps())
    assert metrics["loss/stopped"].mean == 1 and metrics["optimizer/lr"].weight < 8
    assert not made._flat.grads.any()


async def test_a_batch_without_a_valid_row_changes_nothing_and_is_finite():
    made = await device(AlgorithmConfig(entropy_coef=0.1))
    before = made._flat.values.clone()
    metrics = await made.update(steps(valid=False))
    assert torch.equal(before, made._flat.values)
    assert all(np.isfinite(stat.mean) for stat in metrics.values())


@pytest.mark.parametrize("kind", ["ppo", "appo"])
async def test_credit_with_a_memory_is_that_of_each_sequence_alone(kind):
    policy = PolicyConfig(hidden=(8,), recurrent="gru", recurrent_size=8)
    made = await device(AlgorithmConfig(kind=kind), policy)
    batch = steps(memory=8)
    whole = await made.annotate(batch, ["values"])
    for n in range(6):
        at = batch.ended[:, 1] == n
        alone = StepBatch(
            observations={"obs": batch.observations["obs"][:, n : n + 1]},
            ended=batch.ended[at] * [1, 0],
            final_observations={"obs": batch.final_observations["obs"][at]},
            initial_state={"h": batch.initial_state["h"][n : n + 1]},
            **{
                name: getattr(batch, name)[:, n : n + 1]
                for name in ("actions", "rewards", "discounts", "cut", "valid", "resets")
            },
            behavior_logprobs=batch.behavior_logprobs[:, n : n + 1],
            policy_versions=batch.policy_versions[:, n : n + 1],
        )
        found = await made.annotate(alone, ["values"])
        np.testing.assert_allclose(found.advantages[:, 0], whole.advantages[:, n], atol=1e-5)
        np.testing.assert_allclose(found.values[:, 0], whole.values[:, n], atol=1e-5)


async def test_running_figures_move_after_the_update_and_returns_are_normalised_by_them():
    made = await device(AlgorithmConfig(normalise_returns=True), PolicyConfig(hidden=(8,), normalise_observations=True))
    batch = steps()
    values = (await made.annotate(batch, ["values"])).values
    await made.update(batch)
    ((name, normalisers),) = made._network.normalisers()
    expected = batch.observations["obs"][:-1].reshape(-1, 3)
    assert name == "obs" and len(normalisers) == 2
    for normaliser in normalisers:
        np.testing.assert_allclose(normaliser.mean, expected.mean(0), atol=1e-5)
    targets = made._returns
    assert targets[0] == 30 and float(made._network.value_mean) == pytest.approx(targets[1])
    assert not np.allclose((await made.annotate(batch, ["values"])).values, values)


def test_spread_of_nothing_and_of_equal_values():
    shift, scale = module.spread(torch.tensor([3.0, 3.0]), torch.ones(2))
    assert (shift.item(), scale.item()) == (0.0, 1.0)
    shift, scale = module.spread(torch.tensor([1.0, np.float32(7)]), torch.tensor([1.0, 0.0]))
    assert (shift.item(), scale.item()) == (0.0, 1.0)
    shift, scale = module.spread(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert shift.item() == 2.0 and scale.item() == pytest.approx(np.sqrt(2))


@pytest.mark.parametrize("kind", ["ppo", "impala"])
async def test_the_pass_that_acted_teaches_as_one_of_the_trainers_own(kind, monkeypatch):
    """Same weights; and a pass of other steps, or from before an update, is not taken."""
    algorithm, batch = AlgorithmConfig(kind=kind), steps(seed=3)
    alone, sharing = await device(algorithm), await device(algorithm)
    shared = acted_out(sharing, batch)
    with monkeypatch.context() as patch:
        patch.setattr(sharing, "_forward", None)
        one, other = await alone.update(batch), await sharing.update(batch)
    assert {name: stat.mean for name, stat in other.items()} == pytest.approx(
        {n: s.mean for n, s in one.items()}, abs=1e-6
    )
    for mine, theirs in zip(alone._network.parameters(), sharing._network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)

    acted_out(sharing, batch)
    assert shared.take(batch.behavior_logprobs + 1) is None
    acted_out(sharing, batch)
    shared.changes += 1
    assert shared.take(batch.behavior_logprobs) is None
