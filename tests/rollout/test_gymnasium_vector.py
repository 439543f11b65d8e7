"""Environments side by side: every autoreset mode and vectoriser gives the same transitions, episodes and seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, PartFailed
from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import ActionSpec, Leaf, Spaces
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment
from headrace.rollout.environments.shown import Shown
from headrace.training.steps import resets
from rollout.control_helpers import ENVS, actor, collect, counter_transitions, transitions

MODES = [
    ("sync", "next_step"),
    ("sync", "same_step"),
    ("sync", "disabled"),
    ("async", "next_step"),
    ("async", "same_step"),
]


@pytest.mark.parametrize(("mode", "autoreset"), MODES)
async def test_every_mode_gives_the_same_transitions(mode, autoreset):
    """The first ones come in one trajectory, later ones across the border of two: neither runs across a reset."""
    made = actor("counter", mode=mode, autoreset=autoreset, steps=7)
    units = await collect(made, 3)
    await made.close()
    for n in range(2):
        found = transitions(units, n)
        assert len(found) == (21 if autoreset != "next_step" else 16)  # five of 21 rows are resets
        assert found == counter_transitions(3, len(found))


@pytest.mark.parametrize(("mode", "autoreset"), MODES)
async def test_what_ends_in_the_step_that_a_time_limit_cuts_is_terminated_alone(mode, autoreset):
    """The limit is the counter's own length: each of its ends is cut as well, and every second one is a termination."""
    made = actor("counter", mode=mode, autoreset=autoreset, steps=7, max_episode_steps=3)
    units = await collect(made, 3)
    await made.close()
    assert not any((unit.terminated & unit.truncated).any() for unit in units)
    for n in range(2):
        found = transitions(units, n)
        assert found == counter_transitions(3, len(found))


@pytest.mark.parametrize(("mode", "autoreset"), MODES)
async def test_episodes_are_counted_right(mode, autoreset):
    made = actor("counter", mode=mode, autoreset=autoreset, steps=5)
    units = await collect(made, 4)
    await made.close()
    returns = np.concatenate([unit.episode_returns for unit in units])
    lengths = np.concatenate([unit.episode_lengths for unit in units])
    ends = sum(int(unit.terminated.sum() + unit.truncated.sum()) for unit in units)
    assert len(returns) == ends >= 8 and (returns == 1).all() and (lengths == 3).all()


async def test_a_reward_clip_changes_what_is_trained_on_and_not_the_return():
    units = await collect(actor("counter", reward_clip=0.25), 1)
    assert units[0].rewards.max() == 0.25 and (units[0].episode_returns == 1).all()


async def test_frame_skip_adds_rewards_up_and_a_time_limit_counts_what_the_policy_sees():
    (unit,) = await collect(actor("counter", frame_skip=2, options={"length": 4}), 1)
    assert (unit.episode_lengths == 2).all() and (unit.episode_returns == 1).all()
    (unit,) = await collect(actor("counter", frame_skip=2, options={"length": 100}, max_episode_steps=4), 1)
    assert unit.truncated.sum() == 4 and (unit.final_observations["obs"][:, 1] == 8).all()


@pytest.mark.parametrize(("mode", "autoreset"), MODES)
async def test_stacked_frames_never_reach_back_over_a_reset(mode, autoreset):
    """Every row shows the last three of its own episode, the first standing for those before it; so does the true last."""
    made = actor("counter", mode=mode, autoreset=autoreset, steps=20, frame_stack=3, options={"length": 4})
    (unit,) = await collect(made)
    await made.close()
    shown = unit.observations["obs"]
    assert shown.shape == (21, 2, 3, 2)
    finals = unit.final_observations["obs"] if len(unit.ended) else np.zeros((0, 3, 2), np.float32)
    for frames in (*shown.reshape(-1, 3, 2), *finals):
        episode, now = frames[-1]
        expected = [[episode, max(now - back, 0)] for back in (2, 1, 0)]
        np.testing.assert_array_equal(frames, expected)
    lasts = shown[1:][(unit.terminated | unit.truncated)] if autoreset == "next_step" else finals
    assert len(lasts) >= 8 and (lasts[:, -1, 1] == 4).all()


async def test_a_vector_class_stacks_too():
    (unit,) = await collect(actor("CartPole-v1", mode="vector_entry_point", steps=4, frame_stack=2))
    shown = unit.observations["obs"]
    assert shown.shape == (5, 2, 2, 4)
    np.testing.assert_array_equal(shown[1:, :, 0], shown[:-1, :, 1])


@pytest.mark.parametrize("key", ["frame_skip", "max_episode_steps"])
def test_what_a_factory_of_vectors_cannot_do_is_refused(key):
    with pytest.raises(ConfigError, match=f"env.{key}: found 3, but .*make_rows"):
        VectorEnvironment(EnvConfig(id=f"{ENVS}make_rows", count=2, **{key: 3}))


def test_images_grow_smaller_by_the_mean_over_areas_and_turn_grey():
    """By hand: a row of 3 pixels into 2 weighs the middle one by halves; colours are weighed as BT.601 has it."""
    image = np.zeros((1, 9, 12, 3), np.uint8)
    image[0, :, :4] = (100, 0, 0)
    image[0, :, 4:8] = (0, 200, 0)
    spaces = Spaces((Leaf("obs", "image", (9, 12, 3), "uint8"),), ActionSpec("discrete", (), (2,)))
    small = Shown(spaces, EnvConfig(id="x", image_size=(3, 2)), stack=1)
    assert small.spaces.leaves[0].shape == (3, 2, 3)
    np.testing.assert_array_equal(small.first({"obs": image})["obs"][0, 1], [[67, 67, 0], [0, 67, 0]])
    grey = Shown(spaces, EnvConfig(id="x", greyscale=True, image_size=(9, 3)), stack=2)
    assert grey.spaces.leaves[0].shape == (2, 9, 3, 1)
    seen = grey.first({"obs": image})["obs"]
    assert seen.dtype == np.uint8 and seen[0, :, 4, :, 0].tolist() == [[30, 117, 0]] * 2


async def test_a_time_limit_of_the_config_truncates():
    (unit,) = await collect(actor("counter", options={"length": 100}, max_episode_steps=4), 1)
    assert unit.truncated.sum() == 4 and not unit.terminated.any()
    np.testing.assert_array_equal(unit.final_observations["obs"][:, 1], 4)


async def test_the_vector_class_of_cartpole_gives_what_single_ones_give():
    """Flags, lengths and returns hang together the same way; reset rows are not valid."""
    for mode in ("auto", "sync"):
        units = await collect(actor("CartPole-v1", mode=mode, count=16, steps=64), 2)
        lengths = np.concatenate([unit.episode_lengths for unit in units])
        assert lengths.min() >= 8
        np.testing.assert_array_equal(lengths, np.concatenate([unit.episode_returns for unit in units]))
        resets = sum(int((~unit.valid).sum()) for unit in units)
        assert (resets > 0) == (mode == "auto")


def test_disabled_refuses_an_environment_that_resets_all_at_once():
    made = VectorEnvironment(EnvConfig(id=f"{ENVS}make_rows", count=2, options={"mode": "disabled"}))
    made.reset()
    made.environments.step = lambda actions: (
        np.ones((2, 1), np.float32), np.ones(2), np.array([True, False]), np.zeros(2, bool), {}
    )  # fmt: skip
    with pytest.raises(ConfigError, match="resets all environments at once"):
        made.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("kind", ["multi", "start", "box"])
@pytest.mark.parametrize("squash", [False, True])
async def test_every_kind_of_space(kind, squash):
    """Nested observations arrive whole under their names; each action is one that the environment accepts."""
    policy = PolicyConfig(squash=squash and kind == "box", recurrent="gru" if squash else "none")
    made = actor("everything", options={"action": kind}, policy=policy, steps=12)
    (unit,) = await collect(made)
    shapes = {name: (leaf.shape, leaf.dtype.name) for name, leaf in unit.observations.items()}
    assert shapes == {
        "bits": ((13, 2, 5), "int8"),
        "image": ((13, 2, 12, 12, 3), "uint8"),
        "many": ((13, 2, 2), "int64"),
        "pair/0": ((13, 2), "int64"),
        "pair/1": ((13, 2, 2, 2), "float32"),
    }
    assert np.isfinite(unit.behavior_logprobs).all() and len(unit.ended)
    assert set(unit.final_observations) == set(shapes)
    assert (unit.initial_state is None) == (not squash)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EnvConfig(id="CartPole-v77"), "CartPole-v77"),
        (EnvConfig(id="CartPole-v1", autoreset="disabled"), "has its own way"),
        (EnvConfig(id="rollout.control_envs:nobody"), "has no 'nobody'"),
        (EnvConfig(id=f"{ENVS}make_counter", options={"height": 1}), "make_counter failed: TypeError: .*'height'"),
        (EnvConfig(id=f"{ENVS}spaces.Discrete", options={"n": 3}), "made a Discrete, not an environment"),
        (EnvConfig(id="CartPole-v1", options={"height": 1}), "cannot be made: .*'height'"),
        (
            EnvConfig(id="CartPole-v1", mode="vector_entry_point", frame_skip=2),
            "env.frame_skip: found 2, but CartPole-v1",
        ),
        (EnvConfig(id="CartPole-v1", greyscale=True), "env.greyscale: .*shows no image"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(config, words):
    with pytest.raises(ConfigError, match=words) as raised:
        VectorEnvironment(config)
    assert "\n" not in str(raised.value)


async def test_a_wrong_shape_is_refused_and_the_next_trajectory_starts_anew():
    made = actor("rows", options={"shape": "wrong"}, steps=4)
    with pytest.raises(PartFailed, match=r"shape \(2,\), expected \(2, 1\)"):
        await collect(made)
    made.env = EnvConfig(id=f"{ENVS}make_rows", count=2, steps=4)
    (unit,) = await collect(made)
    assert unit.size > 0


@pytest.mark.parametrize(
    ("how", "words"), [("raises", "the wheel is stuck"), ("nan", "observation 'obs' that is not finite"), ("reward", "reward that is not finite")]
)  # fmt: skip
async def test_an_environment_that_misbehaves_fails_its_trajectory_alone(how, words):
    made = actor("misbehaving", options={"how": how, "after": 12})
    await collect(made)
    with pytest.raises(PartFailed, match=words):
        await collect(made)
    (unit,) = await collect(made)
    assert unit.observations["obs"][0, :, 1].tolist() == [0, 0] and made.makes == 2


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
async def test_a_memory_is_carried_over_trajectories_and_empty_where_an_episode_begins(autoreset):
    policy = PolicyConfig(hidden=(8,), recurrent="gru", recurrent_size=8)
    made = actor("counter", policy=policy, autoreset=autoreset, steps=5)
    network, units = made.engine.network, await collect(made, 3)
    for unit in units:
        begins = resets(unit.terminated | unit.truncated, unit.valid)
        state = {name: torch.from_numpy(value) for name, value in unit.initial_state.items()}
        shown = {"obs": torch.from_numpy(unit.observations["obs"][:-1])}
        outputs, _, _ = network.unroll(shown, torch.from_numpy(begins), state)
        logs = made.engine.distribution.logprobs(outputs, torch.from_numpy(unit.actions)).numpy()
        np.testing.assert_allclose(unit.behavior_logprobs[unit.valid], logs[unit.valid], atol=1e-5)
        assert begins.any()
    assert all(np.abs(unit.initial_state["h"]).max() > 0 for unit in units[1:])
