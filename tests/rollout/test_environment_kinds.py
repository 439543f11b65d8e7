"""Environments that other packages bring: each gives trajectories where it is installed, and is named where it is not."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from gymnasium import spaces

from headrace.errors import ConfigError, MissingExtra
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment
from rollout.control_helpers import actor, collect

KINDS = [
    ("Box2D", "LunarLander-v3", {}, {"obs": (8,)}),
    ("vizdoom", "VizdoomBasic-v1", {"image_size": (30, 40), "greyscale": True, "frame_skip": 4},
     {"gamevariables": (1,), "screen": (30, 40, 1)}),
    ("minigrid", "MiniGrid-Empty-5x5-v0", {}, {"direction": (), "image": (7, 7, 3)}),
    ("ale_py", "ALE/Pong-v5", {"options": {"num_threads": 1}}, {"obs": (4, 84, 84)}),
    ("ale_py", "ALE/Pong-v5", {"mode": "sync", "image_size": (42, 42), "greyscale": True, "frame_stack": 2}, {"obs": (2, 42, 42, 1)}),
    ("ale_py", "PongNoFrameskip-v4", {"frame_skip": 4}, {"obs": (210, 160, 3)}),
    ("envpool", "envpool:CartPole-v1", {"frame_stack": 3}, {"obs": (3, 4)}),
]  # fmt: skip


@pytest.mark.parametrize(("package", "name", "env", "shapes"), KINDS)
async def test_an_installed_kind_gives_trajectories(package, name, env, shapes, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # ViZDoom leaves its settings where it runs
    made = actor(name, steps=3, **env)
    (unit,) = await collect(made)
    await made.close()
    assert {leaf: values.shape for leaf, values in unit.observations.items()} == {
        leaf: (4, 2, *shape) for leaf, shape in shapes.items()
    }
    assert unit.valid.all() and np.isfinite(unit.behavior_logprobs).all()


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("ale_py", "ALE/Pong-v5", "atari"),
        ("ale_py", "BreakoutNoFrameskip-v4", "atari"),
        ("vizdoom", "VizdoomBasic-v1", "vizdoom"),
        ("minigrid", "MiniGrid-Empty-5x5-v0", "minigrid"),
        ("minigrid", "BabyAI-GoToObj-v0", "minigrid"),
        ("Box2D", "LunarLander-v3", "box2d"),
        ("mujoco", "HalfCheetah-v5", "mujoco"),
        ("envpool", "envpool:Pong-v5", "envpool"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, name, extra, monkeypatch):
    for loaded in [n for n in sys.modules if n == package or n.startswith((f"{package}.", f"gymnasium.envs.{extra}"))]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"env.id = {name} needs .*pip install 'headrace\[{extra}\]'") as raised:
        VectorEnvironment(EnvConfig(id=name))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["deepmind_lab:lt_chasm", "DeepmindLabSeekavoid-v0", "dmlab:rooms_watermaze"])
def test_deepmind_lab_is_said_to_be_in_no_index(name):
    with pytest.raises(ConfigError, match="DeepMind Lab is in no package index"):
        VectorEnvironment(EnvConfig(id=name))


async def test_ale_skips_stacks_and_limits_as_the_config_says_and_gives_the_games_own_rewards():
    """A limit of 5 steps of 2 frames cuts every episode short: a step, then a reset row, and so on."""
    pytest.importorskip("ale_py")
    made = actor("ALE/Pong-v5", steps=14, frame_skip=2, frame_stack=3, max_episode_steps=5, options={"num_threads": 1})
    (unit,) = await collect(made)
    assert unit.observations["obs"].shape[2:] == (3, 84, 84)
    assert unit.truncated.any() and not unit.terminated.any()
    assert set(unit.episode_lengths.tolist()) == {5}
    from headrace.rollout.environments.making import _ale_options

    spec = types.SimpleNamespace(kwargs={"frameskip": 4})
    assert _ale_options(EnvConfig(id="ALE/Pong-v5", max_episode_steps=10), spec) == {
        "reward_clipping": False, "max_num_frames_per_episode": 40
    }  # fmt: skip


class Pool:
    """EnvPool's face: always `next_step`, actions of its own type, no seed at a reset."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    action_space.dtype = np.dtype(np.int32)

    def __init__(self, count: int) -> None:
        self.t = np.zeros(count, np.int64)
        self.over = np.zeros(count, bool)

    def reset(self):
        return self._shown(), {}

    def step(self, actions):
        assert actions.dtype == np.int32
        self.t = np.where(self.over, 0, self.t + 1)
        self.over = (self.t == 3) & ~self.over
        return self._shown(), self.over.astype(np.float32), self.over.copy(), np.zeros(len(self.t), bool), {}

    def _shown(self):
        return np.stack([self.t, self.t], 1).astype(np.float32)

    def close(self):
        pass


def test_envpools_rows_are_those_of_next_step(monkeypatch):
    made = {}

    def make(task, **options):
        made.update(options, task=task)
        return Pool(options["num_envs"])

    monkeypatch.setitem(sys.modules, "envpool", types.SimpleNamespace(make=make))
    found = VectorEnvironment(EnvConfig(id="envpool:X-v1", count=2, max_episode_steps=9, options={"seed": 4}))
    assert made == {"task": "X-v1", "env_type": "gymnasium", "num_envs": 2, "max_episode_steps": 9, "seed": 4}
    found.reset()
    rows = [found.step(np.zeros(2, np.int64)) for _ in range(6)]
    assert [row.valid[0] for row in rows] == [True, True, True, False, True, True]
    assert [row.observations["obs"][0, 0] for row in rows] == [1, 2, 3, 0, 1, 2]
    assert [bool(row.terminated[0]) for row in rows] == [False, False, True, False, False, False]
