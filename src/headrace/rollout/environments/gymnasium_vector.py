"""Turns environments side by side into ones whose every autoreset mode gives the same transitions.

What a mode does at the end of an episode, and what `step` makes of it:

    next_step   the row shows the true last observation; the next row is a reset, its action ignored: not valid
    same_step   the row already shows the reset observation; the true last one is in the info: `ended`
    disabled    nothing is reset; the ended environments are reset here, by mask, and the row is as in same_step
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError, PartFailed
from headrace.policies.spaces import Spaces, describe_spaces, leaves_of
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.making import make_environments, stacks_itself
from headrace.rollout.environments.shown import Shown
from headrace.types import Array

Leaves = dict[str, Array]


class Step(NamedTuple):
    """One step of all environments.

    observations: leaves [N, ...]; rewards [N] float32, as given; terminated, truncated, valid: [N], never both flags
    ended: [K] environments that `observations` shows reset already; final_observations: leaves [K, ...]
    """

    observations: Leaves
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    ended: Array
    final_observations: Leaves


_NONE = np.zeros(0, np.int64)


class VectorEnvironment:
    """`count` environments. `index` names the actor: no two actors, and no two seeds of a run, share environment seeds."""

    def __init__(self, config: EnvConfig, *, seed: int = 0, index: int = 0) -> None:
        self.config, self.count = config, config.count
        self._sequence = np.random.SeedSequence([seed, index])
        self.environments = make_environments(config, config.count)
        if self.environments.num_envs != self.count:
            raise ConfigError(
                "env.count", f"found {self.count}, but {config.id} made {self.environments.num_envs} environments"
            )
        made = describe_spaces(self.environments.single_observation_space, self.environments.single_action_space)
        self._shown = Shown(made, config, stack=1 if stacks_itself(self.environments) else config.frame_stack)
        self.spaces: Spaces = self._shown.spaces
        self.mode = _autoreset_mode(self.environments)
        self._after_end = np.zeros(self.count, bool)
        self._shapes = {leaf.name: (self.count, *leaf.shape) for leaf in made.leaves}
        self._waits = hasattr(self.environments, "step_async") and hasattr(self.environments, "step_wait")
        self._finish = {"next_step": self._next_step, "same_step": self._same_step, "disabled": self._disabled}[
            self.mode
        ]

    def reset(self) -> Leaves:
        """First observations of new episodes, from seeds never used before."""
        own = [int(s.generate_state(1)[0] >> 1) for s in self._sequence.spawn(self.count)]
        many = hasattr(self.environments, "envs") or hasattr(self.environments, "env_fns")
        observations, _ = self.environments.reset(seed=own if many else own[0])
        self._after_end = np.zeros(self.count, bool)
        return self._shown.first(self._checked(leaves_of(observations)))

    def step(self, actions: Array) -> Step:
        """Actions [N, ...] in the environment's own terms."""
        if self._waits:
            self.environments.step_async(actions)
            result = self.environments.step_wait(timeout=self.config.step_timeout_s)
        else:
            result = self.environments.step(actions)
        observations, rewards, terminated, truncated, info = result
        observations = self._checked(leaves_of(observations))
        rewards = np.asarray(rewards, np.float32)
        if rewards.shape != (self.count,):
            raise PartFailed(f"{self.config.id} gave rewards of shape {rewards.shape}, expected ({self.count},)")
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        made = self._finish(observations, rewards, terminated, truncated & ~terminated, info)
        begins = (made.terminated | made.truncated) if self.mode != "next_step" else ~made.valid
        shown, final = self._shown.step(made.observations, begins, made.ended, made.final_observations)
        return made._replace(observations=shown, final_observations=final)

    def close(self) -> None:
        self.environments.close()

    # --------------------------------------------------------------------------------------------- autoreset modes

    def _next_step(self, observations: Leaves, rewards: Array, terminated: Array, truncated: Array, info: Any) -> Step:
        valid = ~self._after_end
        if self._after_end.any():  # some environments repeat flags or rewards in the reset row
            terminated, truncated, rewards = terminated & valid, truncated & valid, rewards * valid
        self._after_end = terminated | truncated
        return Step(observations, rewards, terminated, truncated, valid, _NONE, {})

    def _same_step(self, observations: Leaves, rewards: Array, terminated: Array, truncated: Array, info: Any) -> Step:
        valid = np.ones(self.count, bool)
        ended = np.flatnonzero(terminated | truncated)
        if not ended.size:
            return Step(observations, rewards, terminated, truncated, valid, _NONE, {})
        final = info.get("final_obs", info.get("final_observation"))
        if final is None:
            raise PartFailed(f"{self.config.id} resets in the same step but gives no final_obs in its info")
        return Step(observations, rewards, terminated, truncated, valid, ended, self._final_leaves(final, ended))

    def _disabled(self, observations: Leaves, rewards: Array, terminated: Array, truncated: Array, info: Any) -> Step:
        valid, done = np.ones(self.count, bool), terminated | truncated
        ended = np.flatnonzero(done)
        if not ended.size:
            return Step(observations, rewards, terminated, truncated, valid, ended, {})
        final = {name: leaf[ended].copy() for name, leaf in observations.items()}
        going_on = {name: leaf[~done].copy() for name, leaf in observations.items()}
        # A dict of its own: the environment takes the mask out of it, and wrappers around it would then see none.
        fresh, _ = self.environments.reset(options={"reset_mask": done.copy()})
        observations = self._checked(leaves_of(fresh))
        if any(not np.array_equal(observations[name][~done], leaf) for name, leaf in going_on.items()):
            raise ConfigError(
                "env.autoreset",
                f'found "disabled", but {self.config.id} resets all environments at once; use next_step',
            )
        return Step(observations, rewards, terminated, truncated, valid, ended, final)

    def _final_leaves(self, final: Any, ended: Array) -> Leaves:
        """Leaves [K, ...] of an object array of observations, or of a dense batch."""
        if isinstance(final, np.ndarray) and final.dtype == object:
            rows = [leaves_of_one(final[n]) for n in ended]
            return {name: np.stack([row[name] for row in rows]) for name in self._shapes}
        return {name: leaf[ended].copy() for name, leaf in leaves_of(final).items() if name in self._shapes}

    def _checked(self, observations: Leaves) -> Leaves:
        """The leaves that the spaces name, in their order."""
        for name, shape in self._shapes.items():
            found = observations.get(name)
            if found is None or found.shape != shape:
                raise PartFailed(
                    f"{self.config.id} gave an observation {name!r} of shape "
                    f"{None if found is None else found.shape}, expected {shape}"
                )
        return {name: observations[name] for name in self._shapes}


def leaves_of_one(observation: Any) -> Leaves:
    """The leaves of one environment's observation."""
    return leaves_of(observation if isinstance(observation, dict | tuple) else np.asarray(observation))


def _autoreset_mode(environments: Any) -> str:
    """The mode in the metadata; next_step, Gymnasium's default, where there is none."""
    mode = environments.metadata.get("autoreset_mode") or getattr(environments, "autoreset_mode", None)
    value = str(getattr(mode, "value", mode) or "NextStep")
    known = {"NextStep": "next_step", "SameStep": "same_step", "Disabled": "disabled"}
    if value not in known:
        raise ConfigError("env.autoreset", f"{value!r} of the environment is not known; use one of {', '.join(known)}")
    return known[value]
