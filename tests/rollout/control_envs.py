"""Small environments for the tests of control, made by name as a user's own are; some misbehave."""

from __future__ import annotations

import time

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class Counter(gymnasium.Env):
    """Shows [episode, step]; an episode ends after `length` steps, by a time limit in every second one. The last step's
    reward is 1, the others' 0."""

    def __init__(self, length: int = 3, low: float = -1.0, high: float = 1.0, box: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(low, high, (1,), np.float32) if box else spaces.Discrete(2)
        self.length, self.episode, self.t = length, -1, 0
        self.given: list = []
        self.seeds: list = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 1, 0
        return self._shown(), {}

    def step(self, action):
        self.given.append(np.array(action))
        self.t += 1
        ended, by_time = self.t == self.length, self.episode % 2 == 1
        return self._shown(), float(ended), ended and not by_time, ended and by_time, {}

    def _shown(self):
        return np.array([self.episode, self.t], np.float32)


def make_counter(**options) -> gymnasium.Env:
    return Counter(**options)


class Slow(Counter):
    """Steps for some milliseconds."""

    def step(self, action):
        time.sleep(0.004)
        return super().step(action)


def make_slow(**options) -> gymnasium.Env:
    return Slow(**options)


class Misbehaving(Counter):
    """After `after` steps it raises, hangs, or gives what it must not."""

    def __init__(self, how: str, after: int = 5) -> None:
        super().__init__(length=100)
        self.how, self.left = how, after

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        self.left -= 1
        if self.left == 0:
            match self.how:
                case "raises":
                    raise ValueError("the wheel is stuck")
                case "hangs":
                    time.sleep(3600)
                case "nan":
                    observation = observation * np.nan
                case "reward":
                    reward = float("inf")
        return observation, reward, terminated, truncated, info


def make_misbehaving(how: str, after: int = 5) -> gymnasium.Env:
    return Misbehaving(how, after)


class Rows(VectorEnv):
    """Plays the rows [obs, done] of a script for ever, in every environment."""

    def __init__(self, num_envs: int, shape: str = "right", mode: str = "next_step") -> None:
        self.num_envs, self.shape = num_envs, shape
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.metadata = {
            "autoreset_mode": {"next_step": AutoresetMode.NEXT_STEP, "disabled": AutoresetMode.DISABLED}[mode]
        }
        self.t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.full((self.num_envs, 1), 0, np.float32), {}

    def step(self, actions):
        # obs [t0, t1, t2, t0, t1, ...], done [F, F, T, F, F, ...]: the done row shows t2, the next one t0
        self.t += 1
        place = self.t % 3
        shown = np.full((self.num_envs, 1), place, np.float32)
        done = np.full(self.num_envs, place == 2)
        # Some environments repeat the flag and a reward in the reset row.
        flags = done | (place == 0)
        if self.shape == "wrong" and self.t == 3:
            shown = shown[:, 0]
        return shown, np.ones(self.num_envs), flags, np.zeros(self.num_envs, bool), {}


def make_rows(num_envs: int, **options) -> VectorEnv:
    return Rows(num_envs, **options)


class Everything(gymnasium.Env):
    """Shows all kinds of leaves, nested, and takes several numbers."""

    def __init__(self, action: str = "multi") -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
                "pair": spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2, 2), np.float32))),
                "many": spaces.MultiDiscrete([2, 4]),
                "bits": spaces.MultiBinary(5),
            }
        )
        self.action_space = {
            "multi": spaces.MultiDiscrete([2, 3]),
            "start": spaces.Discrete(3, start=5),
            "box": spaces.Box(-2, 2, (2, 2), np.float32),
        }[action]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {}


def make_everything(**options) -> gymnasium.Env:
    return Everything(**options)


class Recall(gymnasium.Env):
    """Shows a bit at the first step and nothing later; the right action at the last step is that bit."""

    def __init__(self, length: int = 4) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.t, self.bit = length, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.bit = 0, int(self.np_random.integers(2))
        return np.array([2 * self.bit - 1, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        last = self.t == self.length
        reward = float(last and int(action) == self.bit)
        return np.array([0, self.t == self.length - 1], np.float32), reward, last, False, {}


def make_recall(**options) -> gymnasium.Env:
    return Recall(**options)


class Choice(Counter):
    """Pays the action that was taken: 0 or 1 a step."""

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(action), terminated, truncated, info


def make_choice(**options) -> gymnasium.Env:
    return Choice(**options)
