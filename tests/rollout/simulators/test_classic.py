"""The batched classic control systems against Gymnasium's own, step by step."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.rollout.environments.simulators import make_simulator, make_vector
from headrace.rollout.environments.simulators.base import scramble
from headrace.rollout.environments.simulators.classic import CLASSIC

NAMES = list(CLASSIC)


def random_actions(simulator, rng):
    """Actions that reach every part of the state space; some beyond the bounds."""
    if simulator.actions.choices:
        return torch.from_numpy(rng.integers(simulator.actions.choices, size=simulator.count))
    return torch.from_numpy(rng.uniform(-1.5, 1.5, (simulator.count, 1)) * simulator.actions.high[0])


def random_state(name, rng, count):
    """States from all over, and at the borders where something is clipped."""
    spread = {
        "CartPole-v1": [2.4, 3, 0.21, 3],
        "Pendulum-v1": [9, 8],
        "Acrobot-v1": [3.1, 3.1, 12.5, 28],
        "MountainCar-v0": [0.9, 0.07],
        "MountainCarContinuous-v0": [0.9, 0.07],
    }[name]
    state = rng.uniform(-1, 1, (len(spread), count)) * np.array(spread)[:, None]
    if name.startswith("MountainCar"):
        state[0] -= 0.3
        state[:, 0] = -1.2, -0.07
        state = state.astype(np.float32).astype(np.float64)
    return torch.from_numpy(state)


def one_step_of_gymnasium(environment, state, action):
    """(state, observation, reward, terminated) after one step of the unwrapped environment from `state`."""
    environment.state = np.array(state)
    if hasattr(environment, "steps_beyond_terminated"):
        environment.steps_beyond_terminated = None
    observation, reward, terminated, truncated, _ = environment.step(action)
    assert not truncated
    return np.array(environment.state, dtype=np.float64), observation, float(reward), terminated


@pytest.mark.parametrize("name", NAMES)
def test_one_step_from_anywhere_equals_gymnasiums(name):
    rng, count = np.random.default_rng(0), 300
    environment = gymnasium.make(name).unwrapped
    environment.reset(seed=0)
    simulator = make_simulator(name, count, dtype=torch.float64, time_limit=0)
    simulator.reset()
    before = random_state(name, rng, count)
    simulator.state.copy_(before)
    actions = random_actions(simulator, rng)
    step = simulator.step(actions)
    ended = 0
    for n in range(count):
        action = int(actions[n]) if simulator.actions.choices else actions[n].numpy()
        state, observation, reward, terminated = one_step_of_gymnasium(environment, before[:, n].numpy(), action)
        np.testing.assert_allclose(step.final_observations[n], observation, rtol=2e-7, atol=1e-7)
        assert float(step.rewards[n]) == pytest.approx(reward, abs=1e-12, rel=1e-12)
        assert bool(step.terminated[n]) == terminated
        ended += terminated
        if not terminated:
            np.testing.assert_allclose(simulator.state[:, n], state, rtol=1e-12, atol=1e-12)
    assert name == "Pendulum-v1" or 0 < ended < count


@pytest.mark.parametrize("name", NAMES)
def test_whole_episodes_in_single_precision_stay_near_gymnasiums(name):
    """60 steps (chaos later parts any two precisions) from the simulator's own start."""
    rng = np.random.default_rng(1)
    environment = gymnasium.make(name).unwrapped
    environment.reset(seed=0)
    simulator = make_simulator(name, 1, seeds=3)
    simulator.reset()
    environment.state = simulator.state[:, 0].double().numpy()
    for _ in range(60):
        actions = random_actions(simulator, rng)
        step = simulator.step(actions)
        observation, reward, terminated, _, _ = environment.step(
            int(actions[0]) if simulator.actions.choices else actions[0].numpy()
        )
        np.testing.assert_allclose(step.final_observations[0], observation, atol=2e-4)
        assert float(step.rewards[0]) == pytest.approx(float(reward), abs=2e-3)
        assert bool(step.terminated[0]) == terminated
        if terminated:
            return
    assert name != "CartPole-v1"


@pytest.mark.parametrize("name", NAMES)
def test_starts_lie_where_gymnasiums_do(name):
    environment = gymnasium.make(name)
    reference = np.array([environment.reset(seed=seed)[0] for seed in range(500)])
    found = make_simulator(name, 500, seeds=0).reset().numpy()
    for column in range(found.shape[1]):
        ours, theirs = found[:, column], reference[:, column]
        spread = np.ptp(theirs)
        assert abs(ours.min() - theirs.min()) <= 0.05 * spread and abs(ours.max() - theirs.max()) <= 0.05 * spread
        assert abs(ours.mean() - theirs.mean()) <= 0.1 * spread


@pytest.mark.parametrize("name", NAMES)
def test_spaces_and_time_limit_are_gymnasiums(name):
    reference, ours = gymnasium.make(name), make_vector(3, name)
    assert ours.single_action_space == reference.action_space
    space = ours.single_observation_space
    assert space.shape == reference.observation_space.shape and space.dtype == reference.observation_space.dtype
    assert space.contains(reference.observation_space.high) and space.contains(reference.observation_space.low)
    assert ours.simulator.time_limit == reference.spec.max_episode_steps


def test_an_unknown_name_is_said():
    with pytest.raises(ConfigError, match="sim:Pong cannot be made: Environment `Pong` doesn't exist"):
        make_simulator("Pong", 2)


# ------------------------------------------------------------------------------------------------- resets and seeds


@pytest.mark.parametrize("name", NAMES)
def test_a_time_limit_truncates_and_shows_the_true_last_observation(name):
    simulator = make_simulator(name, 3, time_limit=4, dtype=torch.float64)
    free = make_simulator(name, 3, time_limit=0, dtype=torch.float64)
    simulator.reset(), free.reset()
    rng = np.random.default_rng(0)
    for t in range(1, 9):
        actions = random_actions(simulator, rng)
        step, other = simulator.step(actions), free.step(actions)
        assert step.truncated.tolist() == [t % 4 == 0] * 3 and not step.terminated.any()
        if t <= 4:
            torch.testing.assert_close(step.final_observations, other.final_observations)
        if t % 4:
            assert torch.equal(step.observations, step.final_observations)
        else:
            assert not torch.equal(step.observations, step.final_observations)
            assert (simulator.elapsed == 0).all() and (simulator.episodes == t // 4 + 1).all()


def test_one_environments_end_leaves_its_neighbours_alone():
    simulator = make_simulator("CartPole-v1", 3, dtype=torch.float64)
    simulator.reset()
    simulator.state[:, 1] = torch.tensor([2.39, 5.0, 0.0, 0.0])
    before = simulator.state.clone()
    step = simulator.step(torch.tensor([1, 1, 0]))
    assert step.terminated.tolist() == [False, True, False] and step.rewards.tolist() == [1, 1, 1]
    assert step.final_observations[1, 0] > 2.4 and abs(step.observations[1, 0]) <= 0.05
    assert torch.equal(step.observations[[0, 2]], step.final_observations[[0, 2]])
    assert simulator.elapsed.tolist() == [1, 0, 1]
    torch.testing.assert_close(simulator.state[0, [0, 2]], before[0, [0, 2]] + 0.02 * before[1, [0, 2]])


def test_what_a_step_gave_is_not_written_over_by_the_next():
    simulator = make_simulator("MountainCar-v0", 2)
    first = simulator.reset()
    kept = first.clone()
    step = simulator.step(torch.tensor([2, 2]))
    assert torch.equal(first, kept)
    shown = step.observations.clone()
    simulator.step(torch.tensor([2, 2]))
    assert torch.equal(step.observations, shown)


def test_seeds_decide_starts_one_by_one():
    whole = make_simulator("CartPole-v1", 8, seeds=5)
    first, again = whole.reset(), whole.reset()
    assert not (first == again).any() and first.unique(dim=0).shape[0] == 8
    assert torch.equal(make_simulator("CartPole-v1", 8, seeds=5).reset(), first)
    part = make_simulator("CartPole-v1", 2, seeds=whole.seeds[[6, 3]])
    assert torch.equal(part.reset(), first[[6, 3]]), "whatever its neighbours"
    assert torch.equal(part.reset(), again[[6, 3]]), "episode by episode"
    other = make_simulator("CartPole-v1", 4, seeds=6).seeds.tolist()
    assert not set(other) & set(whole.seeds.tolist())


def test_the_generator_is_splitmix64():
    zero, numbers = torch.zeros(1, dtype=torch.int64), torch.arange(3)
    unsigned = [value % 2**64 for value in scramble(zero, numbers).tolist()]
    assert unsigned == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


# ------------------------------------------------------------------------------------------------------ the device


@pytest.mark.parametrize("name", NAMES)
def test_no_step_asks_the_device_for_a_number(name):
    """Tensors of the meta device hold no numbers: whatever looked at one, or copied it to the host, would raise."""
    simulator = make_simulator(name, 4, seeds=0, device="meta")
    observations = simulator.reset()
    kept = simulator.state
    for _ in range(3):
        shape = simulator.actions.shape
        kind = torch.int64 if simulator.actions.choices else torch.float32
        step = simulator.step(torch.zeros(4, *shape, dtype=kind, device="meta"))
        assert {part.device.type for part in step} == {"meta"} and step.observations.shape == observations.shape
    assert simulator.state is kept, "the state is written in place"
    with pytest.raises(Exception, match="meta"):
        step.rewards.sum().item()


def test_the_cpu_shortcut_changes_nothing():
    """What a device without the shortcut does at every step: restart where done, observe again."""
    fast, slow = (make_simulator("CartPole-v1", 64, seeds=1, time_limit=30) for _ in range(2))
    slow.device = torch.device("meta")  # only its name is asked
    slow._begin = lambda where: (setattr(slow, "device", torch.device("cpu")), type(slow)._begin(slow, where),
                                 setattr(slow, "device", torch.device("meta")))  # fmt: skip
    rng = np.random.default_rng(2)
    slow._begin(torch.ones(64, dtype=torch.bool))
    assert torch.equal(fast.reset(), slow.observe())
    for _ in range(100):
        actions = random_actions(fast, rng)
        for a, b in zip(fast.step(actions), slow.step(actions), strict=True):
            assert torch.equal(a, b)


# --------------------------------------------------------------------------------------------------- as numpy arrays


def test_as_a_vector_environment_it_shows_final_observations():
    environments = make_vector(3, "CartPole-v1", time_limit=5)
    observations, _ = environments.reset(seed=[7, 8, 7])
    assert observations.dtype == np.float32 and (observations[0] == observations[2]).all()
    again, _ = environments.reset(seed=[7, 8, 7])
    assert (again == observations).all()
    for t in range(1, 6):
        observations, _, terminated, truncated, info = environments.step(np.array([0, 1, 0]))
        assert ("final_obs" in info) == (t == 5)
    assert truncated.all() and not terminated.any() and info["_final_obs"].all()
    assert (np.abs(observations) <= 0.05).all() and (np.abs(info["final_obs"][:, 1]) > 0.5).all()
    assert environments.reset(seed=3)[0].shape == (3, 4)
    environments.close()


def test_stepped_copies_serve_as_a_vector_environment_too():
    environments = make_vector(2, "MountainCar-v0", time_limit=0)
    stepped = make_vector(2, "InvertedPendulum-v5", threads=1)
    for made in (environments, stepped):
        first, _ = made.reset(seed=[3, 4])
        assert first.dtype == np.float32 and (made.reset(seed=[3, 4])[0] == first).all()
        assert (made.reset()[0] != first).any()
        made.close()
