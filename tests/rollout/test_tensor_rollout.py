"""Simulator, policy and learner on one device: the steps are one memory, and nothing of them is asked for on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import PartFailed
from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import PLAIN
from headrace.protocols import Resources, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.simulators import make_simulator
from headrace.rollout.tensor_rollout import TensorActor
from headrace.training.backends.tensor_device import TensorDevice, TensorRows
from headrace.training.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from headrace.types import RequestKey

POLICY = PolicyConfig(kind="actor_critic", hidden=(16,))


def context(name):
    return WorkerContext(name=name, record=lambda event: None, resources=Resources(threads=0))


def actor(name="CartPole-v1", *, seed=0, **env):
    config = EnvConfig(id=f"sim:{name}", **{"count": 5, "steps": 12, **env})
    return TensorActor(context("engine-0"), config, POLICY, None, seed)


def request(number):
    return TrajectoryRequest(key=RequestKey(lease_id=f"0-{number}"))


async def trainer(spaces, algorithm="ppo", device="cpu", lr=1e-3, **training):
    config = TrainingConfig(optimizer=OptimizerConfig(lr=lr), **training)
    made = TensorDevice(context("trainer"), config, AlgorithmConfig(kind=algorithm), POLICY, None, 0, device)
    await made.begin(spaces)
    return made


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
async def test_a_trajectory_is_what_the_simulator_does_with_its_actions(name):
    made = actor(name, max_episode_steps=7)
    simulator = make_simulator(name, 5, seeds=made.environments.simulator.seeds, time_limit=7)
    shown = simulator.reset()
    for number in range(3):
        unit = await made.generate(request(number))
        ended = {(t, n): unit.final_observations[PLAIN][k] for k, (t, n) in enumerate(unit.ended.tolist())}
        for t in range(12):
            assert torch.equal(unit.observations[PLAIN][t], shown)
            step = simulator.step(made.engine.distribution.to_simulator(unit.actions[t]))
            assert torch.equal(unit.rewards[t], step.rewards)
            assert torch.equal(unit.terminated[t], step.terminated) and torch.equal(unit.truncated[t], step.truncated)
            for n in step.truncated.nonzero()[:, 0].tolist():
                assert torch.equal(ended.pop((t, n)), step.final_observations[n])
            shown = step.observations
        assert not ended and torch.equal(unit.observations[PLAIN][12], shown)
        assert unit.size == 60 and unit.oldest_version == -1
        outputs, _ = made.engine.network.act({PLAIN: unit.observations[PLAIN][:-1].flatten(0, 1)}, {})
        logprobs = made.engine.distribution.logprobs(outputs, unit.actions.flatten(0, 1))
        torch.testing.assert_close(unit.behavior_logprobs.flatten(), logprobs)


async def test_returns_and_lengths_are_those_of_the_episodes():
    made = actor(count=7, steps=9, max_episode_steps=13)
    open_returns, open_lengths, seen = np.zeros(7), np.zeros(7, int), []
    for number in range(8):
        unit = await made.generate(request(number))
        expected = []
        for t in range(9):
            open_returns += unit.rewards[t].numpy() * 2.0
            open_lengths += 1
            for n in np.flatnonzero(unit.terminated[t] | unit.truncated[t]):
                expected.append((n, open_returns[n] / 2.0, open_lengths[n]))
                open_returns[n], open_lengths[n] = 0.0, 0
        expected.sort(key=lambda episode: episode[0])
        assert unit.episode_returns.tolist() == [episode[1] for episode in expected]
        assert unit.episode_lengths.tolist() == [episode[2] for episode in expected]
        seen += expected
    assert len(seen) > 20 and max(episode[2] for episode in seen) == 13


class HostAccess(AssertionError):
    pass


@pytest.fixture
def no_host(monkeypatch):
    """Reading a tensor's numbers fails."""

    def refuse(self, *args, **kwargs):
        raise HostAccess("a step's tensor was read by the host")

    def forbid():
        for name in ("cpu", "numpy", "item", "tolist", "__array__", "__float__", "__int__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)

    yield forbid
    monkeypatch.undo()


async def test_recording_reads_nothing_on_the_host_and_copies_nothing_for_the_policy(no_host, monkeypatch):
    made, seen = actor(), []
    step = made.engine.step

    def watched(observations, state, noise):
        seen.append(observations[PLAIN])
        return step(observations, state, noise)

    made.engine.step = watched
    made._trajectory_of = lambda request, *parts: parts
    no_host()
    observations, *_ = await made._record_trajectory(request(0))
    monkeypatch.undo()
    assert len(seen) == 12
    for t, shown in enumerate(seen):
        assert shown.data_ptr() == observations[t].data_ptr(), "the policy sees the recording itself"


async def test_the_learner_works_on_the_memory_that_was_recorded():
    made = actor()
    unit = await made.generate(request(0))
    rows = TensorRows([unit])
    for mine, recorded in (
        (rows.observations[PLAIN], unit.observations[PLAIN]),
        (rows.leaves[PLAIN], unit.observations[PLAIN]),
        (rows.actions, unit.actions),
        (rows.behavior_logprobs, unit.behavior_logprobs),
        (rows.rewards, unit.rewards),
    ):
        assert mine.data_ptr() == recorded.data_ptr()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
async def test_steps_and_credit_run_where_there_are_no_numbers(name):
    """On the meta device whatever asked for a number would raise: a GPU is never waited for."""
    made = actor(name)
    simulator = made.environments.simulator = make_simulator(name, 5, device="meta")
    made.engine.network.to("meta")
    noise = made.engine.noise(12, 5).to("meta")
    made.engine.noise = lambda steps, count: noise
    made._shown = simulator.reset()
    made._trajectory_of = lambda request, *parts: parts
    observations, actions, outputs, _, results = await made._record_trajectory(request(0))
    learner = await trainer(made.engine.spaces, "impala")
    learner._network.to("meta")
    rows = TensorRows.__new__(TensorRows)
    rows.steps, rows.count, rows.ended = 12, 5, []
    rows.leaves = {PLAIN: observations}
    rows.observations = {PLAIN: observations[:-1].flatten(0, 1)}
    rows.actions = actions.flatten(0, 1)
    rows.behavior_logprobs = made.engine.distribution.logprobs(outputs, actions).flatten()
    for mine, field in (("rewards", "rewards"), ("terminated", "terminated"), ("cut", "truncated")):
        setattr(rows, mine, torch.stack([getattr(result, field) for result in results]))
    values, advantages, targets = learner._tensor_credit(rows)
    assert {part.device.type for part in (values, advantages, targets)} == {"meta"} and targets.shape == (60,)


async def test_two_trajectories_learn_like_one_of_both():
    """Joined along the environments, with the final observations where they belong."""
    first, second = actor(seed=1, max_episode_steps=5), actor(seed=2, max_episode_steps=5)
    units = [await first.generate(request(0)), await second.generate(request(1))]
    made = await trainer(first.engine.spaces)
    joined = made._tensor_credit(TensorRows(units))
    apart = [made._tensor_credit(TensorRows([unit])) for unit in units]
    assert len(TensorRows(units).ended) > 10
    for both, *parts in zip(joined, *apart, strict=True):
        torch.testing.assert_close(both.view(12, 10), torch.cat([part.view(12, 5) for part in parts], 1))


@pytest.mark.parametrize("algorithm", ["ppo", "appo", "impala"])
async def test_learning_lowers_the_value_loss(algorithm):
    made = actor(count=32, steps=32)
    units = [await made.generate(request(0))]
    learner = await trainer(made.engine.spaces, algorithm, lr=1e-2, epochs=4, minibatches=2)
    losses = [(await learner.learn(units))["loss/value"].mean for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


async def test_what_is_not_finite_fails_the_request_and_the_next_one_starts_anew():
    made = actor("Pendulum-v1")
    await made.generate(request(0))
    made.environments.simulator.state[0, 2] = float("nan")
    with pytest.raises(PartFailed, match="sim:Pendulum-v1 gave observations or rewards that are not finite"):
        await made.generate(request(1))
    unit = await made.generate(request(2))
    assert unit.observations[PLAIN].isfinite().all() and made.makes == 2
