"""MuJoCo through its threaded rollout, and through stepping, against Gymnasium's environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.rollout.environments.simulators import make_simulator
from headrace.rollout.environments.simulators.mujoco_rollout import MUJOCO, HalfCheetah

pytestmark = pytest.mark.filterwarnings("ignore")


def gymnasium_at(name, positions, velocities):
    """Gymnasium's environment in this state, as it is after a reset."""
    environment = gymnasium.make(name, disable_env_checker=True).unwrapped
    environment.reset(seed=0)
    environment.set_state(positions.numpy().copy(), velocities.numpy().copy())
    return environment


def random_actions(simulator, rng):
    return torch.from_numpy(rng.uniform(-1.2, 1.2, (simulator.count, simulator.model.nu)))


@pytest.mark.parametrize("name", ["HalfCheetah-v4", "HalfCheetah-v5", "Ant-v4"])
def test_steps_equal_gymnasiums(name):
    simulator = make_simulator(name.replace("-v5", "-v4"), 3, dtype=torch.float64, threads=2)
    simulator.reset()
    environment = gymnasium_at(name, simulator.positions[1], simulator.velocities[1])
    rng, apart, ended = np.random.default_rng(0), [], False
    for _ in range(40):
        actions = random_actions(simulator, rng)
        step = simulator.step(actions)
        observation, reward, terminated, _, _ = environment.step(actions[1].numpy())
        np.testing.assert_allclose(step.final_observations[1], observation, atol=1e-7, rtol=1e-7)
        assert bool(step.terminated[1]) == terminated
        apart.append(float(step.rewards[1]) - reward)
        if terminated:
            ended = True
            break
    if name == "Ant-v4":
        assert np.abs(apart).mean() < 0.01 and np.abs(apart).max() < 0.1, "see the class: xpos against qpos"
        assert abs(np.sum(apart)) < 0.1, "the distances are the same"
    else:
        assert np.abs(apart).max() < 1e-9
    assert not ended or name == "Ant-v4"
    simulator.close()


@pytest.mark.parametrize("height, healthy", [(0.19, False), (0.21, True), (0.99, True), (1.01, False)])
def test_the_ant_ends_outside_its_heights(height, healthy):
    simulator = make_simulator("Ant-v4", 2, dtype=torch.float64, threads=1)
    simulator.reset()
    simulator.positions[1, 2] = height
    simulator.move = lambda actions: torch.zeros(2, dtype=torch.float64)
    step = simulator.step(torch.zeros(2, 8))
    assert step.terminated.tolist() == [False, not healthy] and step.rewards.tolist() == [1.0, 1.0]
    assert (float(step.observations[1, 0]) == height) == healthy
    assert float(step.final_observations[1, 0]) == height, "the true last observation, also when it was reset"


@pytest.mark.parametrize("name", list(MUJOCO))
def test_starts_are_spread_as_gymnasiums_are(name):
    found = make_simulator(name, 400, dtype=torch.float64).reset().numpy()
    environment = gymnasium.make(name, disable_env_checker=True).unwrapped
    reference = np.array([environment.reset(seed=seed)[0] for seed in range(400)])
    np.testing.assert_allclose(found.mean(0), reference.mean(0), atol=0.03)
    np.testing.assert_allclose(found.std(0), reference.std(0), atol=0.015)


def test_resets_do_not_disturb_the_neighbours():
    whole = HalfCheetah(3, seeds=4, dtype=torch.float64, time_limit=5)
    alone = HalfCheetah(1, seeds=whole.seeds[[2]], dtype=torch.float64, time_limit=5)
    whole.reset(), alone.reset()
    whole.elapsed[0] = 3
    rng = np.random.default_rng(0)
    for t in range(1, 9):
        actions = random_actions(whole, rng)
        step, single = whole.step(actions), alone.step(actions[[2]])
        for part, own in zip(step, single, strict=True):
            torch.testing.assert_close(part[[2]], own, atol=1e-9, rtol=1e-9)
        assert step.truncated.tolist() == [t in (2, 7), t == 5, t == 5]
    whole.close(), alone.close()


def test_arrays_and_tensors_are_one_memory():
    simulator = HalfCheetah(2)
    pairs = zip(
        (simulator.now, simulator.path, simulator.controls), [simulator._arrays[i] for i in (0, 3, 2)], strict=True
    )
    assert all(tensor.data_ptr() == array.ctypes.data for tensor, array in pairs)


@pytest.mark.parametrize("name", ["Humanoid-v4", "Ant-v5"])
def test_stepping_equals_gymnasiums(name):
    """Contact forces included."""
    simulator = make_simulator(name, 3, seeds=torch.tensor([5, 6, 7]), dtype=torch.float64, threads=2)
    references = [gymnasium.make(name, disable_env_checker=True) for _ in range(3)]
    first = [environment.reset(seed=seed)[0] for environment, seed in zip(references, (5, 6, 7), strict=True)]
    np.testing.assert_array_equal(simulator.reset(), first)
    rng, ends = np.random.default_rng(0), 0
    for _ in range(80):
        actions = rng.uniform(-0.4, 0.4, (3, len(simulator.actions.low))).astype(np.float32)
        step = simulator.step(torch.from_numpy(actions))
        for n, environment in enumerate(references):
            observation, reward, terminated, truncated, _ = environment.step(actions[n])
            np.testing.assert_array_equal(step.final_observations[n], observation)
            assert float(step.rewards[n]) == reward and bool(step.terminated[n]) == terminated
            if terminated or truncated:
                ends += 1
                np.testing.assert_array_equal(step.observations[n], environment.reset()[0])
    assert ends or name == "Ant-v5"
    simulator.close()


def test_stepping_counts_the_time_limit_itself():
    simulator = make_simulator("InvertedPendulum-v5", 2, time_limit=3, threads=1)
    simulator.reset()
    for t in range(1, 5):
        step = simulator.step(torch.zeros(2, 1))
        assert step.truncated.tolist() == [t == 3] * 2 and not step.terminated.any()
        assert torch.equal(step.observations, step.final_observations) == (t != 3)
    simulator.close()


@pytest.mark.slow
@pytest.mark.parametrize("physics, package", [("mjx", "mujoco.mjx"), ("warp", "mujoco_warp")])
@pytest.mark.parametrize("name", list(MUJOCO))
def test_other_physics_stay_near_for_a_few_steps(name, physics, package):
    """Single precision and another solver: near, not equal, and ant parts at its first contact, in the third step. Run where
    the package is installed."""
    pytest.importorskip(package)
    ours = make_simulator(name, 2, seeds=3, dtype=torch.float64, threads=1)
    theirs = make_simulator(name, 2, seeds=3, dtype=torch.float64, threads=1, physics=physics)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    rng = np.random.default_rng(0)
    for _ in range(2):
        actions = random_actions(ours, rng)
        expected, step = ours.step(actions), theirs.step(actions)
        np.testing.assert_allclose(step.final_observations, expected.final_observations, atol=0.2)
        np.testing.assert_allclose(step.rewards, expected.rewards, atol=0.2)


def test_other_physics_are_named_when_they_are_not_there():
    with pytest.raises(ConfigError, match="found 'bullet'; use rollout, mjx or warp"):
        make_simulator("Ant-v4", 1, physics="bullet")
