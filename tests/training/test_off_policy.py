"""DQN and SAC as whole learners: small problems whose answer is known, and the trainer's side of the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, RunDirError
from headrace.policies.config import PolicyConfig
from headrace.policies.distributions import distribution_of
from headrace.policies.networks import build_network
from headrace.policies.spaces import ActionSpec, Leaf, Spaces
from headrace.protocols import Resources, WorkerContext
from headrace.training.backends.replay_device import ReplayDevice
from headrace.training.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from headrace.training.off_policy import Dqn, Draw, Sac
from headrace.types import Transitions

DISCRETE = Spaces((Leaf("obs", "vector", (3,), "float32"),), ActionSpec("discrete", (), sizes=(2,), starts=(0,)))
BOX = Spaces((Leaf("obs", "vector", (1,), "float32"),), ActionSpec("box", (1,), low=(-2.0,), high=(2.0,)))
Q_POLICY = PolicyConfig(kind="q", hidden=(32,), activation="relu")
SOFT_POLICY = PolicyConfig(kind="soft_actor", squash=True, hidden=(32,), activation="relu")


def training(lr=1e-2):
    return TrainingConfig(optimizer=OptimizerConfig(lr=lr, clip_norm=0.0, betas=(0.9, 0.999)))


def chain(generator, size=64):
    """Three states in a row. Action 1 walks right, out of the last one with reward 1 and an end; action 0 stays, reward 0.1."""
    states = torch.randint(3, (size,), generator=generator)
    actions = torch.randint(2, (size,), generator=generator)
    ends = (actions == 1) & (states == 2)
    after = (states + actions).clamp(max=2)
    one_hot = torch.eye(3)
    rewards = torch.where(actions == 1, ends.float(), 0.1)
    return Draw({"obs": one_hot[states]}, actions, rewards, torch.where(ends, 0.0, 0.8), {"obs": one_hot[after]}, torch.ones(size))  # fmt: skip


@pytest.mark.parametrize("double", [True, False])
def test_dqn_finds_the_values_of_a_chain(double):
    """gamma .8: V = 0.64, 0.8, 1 walking; staying is worth 0.1 + 0.8 V."""
    algorithm = AlgorithmConfig(kind="dqn", double=double, target_rate=1.0, target_every=20)
    learner, generator = Dqn(DISCRETE, Q_POLICY, training(), algorithm, 0), torch.Generator().manual_seed(0)
    for _ in range(500):
        learner.update(chain(generator))
    found = learner.network({"obs": torch.eye(3)})
    expected = [[0.1 + 0.8 * 0.64, 0.64], [0.1 + 0.8 * 0.8, 0.8], [0.1 + 0.8, 1.0]]
    torch.testing.assert_close(found.detach(), torch.tensor(expected), atol=0.03, rtol=0)


def test_the_target_network_moves_at_its_intervals_only():
    algorithm = AlgorithmConfig(kind="dqn", target_rate=1.0, target_every=3)
    learner, generator = Dqn(DISCRETE, Q_POLICY, training(), algorithm, 0), torch.Generator().manual_seed(0)

    def same():
        pairs = zip(learner.target.parameters(), learner.network.parameters(), strict=True)
        return all(torch.equal(slow, fast) for slow, fast in pairs)

    seen = []
    for _ in range(6):
        learner.update(chain(generator))
        seen.append(same())
    assert seen == [False, False, True] * 2


def bandit(generator, size=64):
    """One step, reward -(a - 0.5)^2 of the bounded action a."""
    raw = torch.randn(size, 1, generator=generator)
    rewards = -(torch.tanh(raw[:, 0]) - 0.5).square()
    nothing = {"obs": torch.zeros(size, 1)}
    return Draw(nothing, raw, rewards, torch.zeros(size), nothing, torch.ones(size))


def test_sac_finds_the_best_action_and_the_entropy_it_is_tuned_for():
    algorithm = AlgorithmConfig(kind="sac", target_entropy=-1.0, temperature=0.03)
    learner, generator = Sac(BOX, SOFT_POLICY, training(1e-2), algorithm, 0), torch.Generator().manual_seed(0)
    entropies = [learner.update(bandit(generator))[0]["loss/entropy"].item() for _ in range(600)]
    outputs, _ = learner.network.act({"obs": torch.zeros(1, 1)}, {})
    assert math.tanh(outputs[0, 0].item()) == pytest.approx(0.5, abs=0.1)
    assert np.mean(entropies[-200:]) == pytest.approx(-1.0, abs=0.15)
    assert learner.temperature.log.exp().item() < 0.03


def test_epsilon_falls_and_travels_with_the_weights():
    learner = Dqn(DISCRETE, Q_POLICY, training(), AlgorithmConfig(kind="dqn", epsilon=(1.0, 0.1), epsilon_share=0.5), 0)
    seen = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        learner.explore(progress)
        seen.append(learner.network.state_dict()["epsilon"].item())
    assert seen == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_the_acting_policy_is_epsilon_greedy():
    network = build_network(DISCRETE, Q_POLICY, 2, 0)
    network.epsilon.fill_(0.2)
    observations = {"obs": torch.eye(3)}
    logits, _ = network.act(observations, {})
    best = network(observations).argmax(1)
    chances = logits.softmax(1)
    torch.testing.assert_close(chances.gather(1, best[:, None])[:, 0], torch.full((3,), 0.9))
    network.epsilon.fill_(0.0)
    distribution, generator = distribution_of(DISCRETE.action), torch.Generator().manual_seed(0)
    logits, _ = network.act({"obs": torch.eye(3)[:1].expand(500, 3)}, {})
    sampled = distribution.sample(logits, distribution.noise((500,), generator))
    assert (sampled == best[0]).all() and (distribution.logprobs(logits, sampled) == 0).all()


def test_each_algorithm_refuses_the_other_kind_of_action():
    with pytest.raises(ConfigError, match='found "dqn", but the actions are not one discrete number'):
        Dqn(BOX, Q_POLICY, training(), AlgorithmConfig(kind="dqn"), 0)
    with pytest.raises(ConfigError, match='found "sac", but the actions are discrete'):
        Sac(DISCRETE, SOFT_POLICY, training(), AlgorithmConfig(kind="sac"), 0)


# --------------------------------------------------------------------------------------------------------- the trainer


def transitions(kind, seed, size=16):
    rng = np.random.default_rng(seed)
    width = 3 if kind == "dqn" else 1

    def shown():
        return {"obs": rng.normal(size=(size, width)).astype(np.float32)}

    actions = rng.integers(2, size=size) if kind == "dqn" else rng.normal(size=(size, 1)).astype(np.float32)
    return Transitions(
        observations=shown(),
        actions=actions,
        rewards=rng.normal(size=(size, 2)).astype(np.float32),
        steps=rng.integers(1, 3, size=size),
        terminated=rng.random(size) < 0.2,
        next_observations=shown(),
        weights=np.ones(size, dtype=np.float32),
        serials=np.arange(size),
        policy_versions=np.zeros(size, dtype=np.int64),
    )


async def device(kind, seed=0, events=None):
    context = WorkerContext(
        name="trainer", record=(events if events is not None else []).append, resources=Resources(threads=0)
    )
    policy, spaces = (Q_POLICY, DISCRETE) if kind == "dqn" else (SOFT_POLICY, BOX)
    made = ReplayDevice(context, training(), AlgorithmConfig(kind=kind), policy, None, seed)
    await made.begin(spaces)
    return made


@pytest.mark.parametrize("kind", ["dqn", "sac"])
async def test_a_saved_trainer_goes_on_bit_for_bit(kind, tmp_path):
    made = await device(kind)
    for seed in range(3):
        await made.update(transitions(kind, seed))
    await made.save(str(tmp_path / "model"))
    again = await device(kind, seed=9)
    assert await again.fingerprint() != await made.fingerprint()
    await again.load(str(tmp_path / "model"))
    for seed in range(3, 6):
        metrics, errors = await made.update(transitions(kind, seed))
        same, same_errors = await again.update(transitions(kind, seed))
        np.testing.assert_array_equal(errors, same_errors)
        assert metrics == same
    assert await again.fingerprint() == await made.fingerprint()
    other = await device("sac" if kind == "dqn" else "dqn")
    with pytest.raises(RunDirError, match="holds other networks"):
        await other.load(str(tmp_path / "model"))


async def test_the_trainer_says_when_it_is_busy():
    events = []
    made = await device("dqn", events=events)
    metrics, errors = await made.update(transitions("dqn", 0))
    assert errors.shape == (16,) and metrics["loss/total"].weight == 1
    assert [event.kind for event in events] == ["forward_backward"] and events[0].duration_ns > 0
