"""Turns a Gymnasium id or a user's factory into environments side by side whose every autoreset mode gives the same transitions.

What a mode does at the end of an episode, and what `step` makes of it:

    next_step   the row shows the true last observation; the next row is a reset, its action ignored: not valid
    same_step   the row already shows the reset observation; the true last one is in the info: `ended`
    disabled    nothing is reset; the ended environments are reset here, by mask, and the row is as in same_step
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError, MissingExtra, PartFailed
from headrace.imports import import_object
from headrace.policies.spaces import Spaces, describe_spaces, leaves_of
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.shown import Shown
from headrace.rollout.environments.single_environments import SingleEnvironments
from headrace.types import Array

Leaves = dict[str, Array]
_ID = re.compile(r"-v\d+$")


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
        self._shown = Shown(made, config, stack=1 if _stacks_itself(self.environments) else config.frame_stack)
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


# ------------------------------------------------------------------------------------------------------------ making


def make_environments(config: EnvConfig, count: int) -> Any:
    """A Gymnasium `VectorEnv` of `count` environments. Raises `ConfigError` for one that cannot be made."""
    try:
        import gymnasium
    except ImportError:
        raise MissingExtra("gymnasium", "control", "env.id") from None
    place, _, rest = config.id.rpartition(":")
    if _DEEPMIND_LAB.match(config.id):
        _register(gymnasium, config.id)
    if place == "sim":
        from headrace.rollout.environments.simulators import make_vector

        return make_vector(count, rest, **simulator_options(config))
    if place == "envpool":
        return _envpool(rest, config, count)
    if place and not _ID.search(rest):
        return _from_factory(gymnasium, config, count)
    try:
        return _from_id(gymnasium, config, count)
    except gymnasium.error.DependencyNotInstalled as error:
        raise _missing_part(gymnasium, config.id) or ConfigError("env.id", " ".join(str(error).split())) from None
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise ConfigError("env.id", f"{config.id!r} cannot be made: {' '.join(str(error).split())}") from None


def simulator_options(config: EnvConfig) -> dict[str, Any]:
    """[env] as the simulators take it."""
    limit = {"time_limit": config.max_episode_steps} if config.max_episode_steps else {}
    return {"device": config.device, **limit, **config.options}


def _from_id(gymnasium: Any, config: EnvConfig, count: int) -> Any:
    _register(gymnasium, config.id)
    spec = gymnasium.spec(config.id)
    wrappers = _wrappers(gymnasium, config)
    mode = config.mode
    if mode == "auto":
        mode = (
            "vector_entry_point" if spec.vector_entry_point is not None and (not wrappers or _is_ale(spec)) else "sync"
        )
    options: dict[str, Any] = dict(config.options)
    if mode == "vector_entry_point":
        if config.autoreset not in ("auto", "next_step") and "autoreset_mode" not in options:
            raise ConfigError(
                "env.autoreset", f'found "{config.autoreset}", but the vector class of {config.id} has its own way; '
                "use auto, or env.mode = sync",
            )  # fmt: skip
        if _is_ale(spec):
            options = _ale_options(config, spec)
        elif wrappers:
            raise _only_for_single("frame_skip", config)
        elif config.max_episode_steps:
            options["max_episode_steps"] = config.max_episode_steps
        return gymnasium.make_vec(config.id, num_envs=count, vectorization_mode=mode, **options)
    if config.max_episode_steps:
        options["max_episode_steps"] = config.max_episode_steps * config.frame_skip
    if _steps_them_here(config, mode):

        def one() -> Any:
            return _wrapped(gymnasium.make(config.id, disable_env_checker=True, **options), wrappers)

        return SingleEnvironments([one] * count)
    return gymnasium.make_vec(
        config.id,
        num_envs=count,
        vectorization_mode=mode,
        vector_kwargs=_vector_options(gymnasium, config, mode),
        wrappers=wrappers,
        disable_env_checker=True,
        **options,
    )


def _only_for_single(key: str, config: EnvConfig) -> ConfigError:
    return ConfigError(
        f"env.{key}",
        f"found {getattr(config, key)}, but {config.id} makes all its environments as one, which cannot be held one by one; "
        f"use env.mode = sync where it has single ones, or the vector's own setting (env.options)",
    )


def _is_ale(spec: Any) -> bool:
    return str(spec.vector_entry_point).startswith("ale_py")


def _ale_options(config: EnvConfig, spec: Any) -> dict[str, Any]:
    """[env] in the words of ALE's vector class, which skips, stacks and limits by itself and counts frames of the game.
    Rewards are clipped by `env.reward_clip` alone, so that returns are those of the game."""
    options: dict[str, Any] = {"reward_clipping": False, **config.options}
    if config.frame_skip > 1:
        options["frameskip"] = config.frame_skip
    if config.frame_stack > 1:
        options["stack_num"] = config.frame_stack
    if config.max_episode_steps:
        skip = options.get("frameskip", spec.kwargs.get("frameskip", 4))
        options["max_num_frames_per_episode"] = config.max_episode_steps * skip
    return options


def _stacks_itself(environments: Any) -> bool:
    return type(environments).__module__.startswith("ale_py")


def _vector_options(gymnasium: Any, config: EnvConfig, mode: str) -> dict[str, Any]:
    modes = gymnasium.vector.AutoresetMode
    chosen = {"next_step": modes.NEXT_STEP, "disabled": modes.DISABLED}.get(config.autoreset, modes.SAME_STEP)
    # What a step shows is copied into the trajectory at once.
    return {"autoreset_mode": chosen, "copy": False}


def _steps_them_here(config: EnvConfig, mode: str) -> bool:
    """Single environments, one after the other in this process, reset at once: no need of Gymnasium's own loop."""
    return mode != "async" and config.autoreset in ("auto", "same_step")


def _wrapped(environment: Any, wrappers: list[Callable[[Any], Any]]) -> Any:
    for wrap in wrappers:
        environment = wrap(environment)
    return environment


def _wrappers(gymnasium: Any, config: EnvConfig) -> list[Callable[[Any], Any]]:
    wrappers: list[Callable[[Any], Any]] = []
    if config.frame_skip > 1:
        wrappers.append(lambda env: _frame_skip(gymnasium, env, config.frame_skip))
    return wrappers


def _frame_skip(gymnasium: Any, environment: Any, times: int) -> Any:
    class FrameSkip(gymnasium.Wrapper):
        """Repeats an action and adds its rewards up, to the end of the episode at most."""

        def step(self, action: Any) -> Any:
            total = 0.0
            for _ in range(times):
                observation, reward, terminated, truncated, info = self.env.step(action)
                total += float(reward)
                if terminated or truncated:
                    break
            return observation, total, terminated, truncated, info

    return FrameSkip(environment)


def _from_factory(gymnasium: Any, config: EnvConfig, count: int) -> Any:
    """A function of the options: of a vector if it takes `num_envs`, else of one environment."""
    import inspect

    make = import_object(config.id, Path.cwd(), "env.id")
    if "num_envs" in inspect.signature(make).parameters:
        for key, unused in (("frame_skip", 1), ("max_episode_steps", 0)):
            if getattr(config, key) != unused:
                raise _only_for_single(key, config)
        return _made_by(config, make, "num_envs", num_envs=count)

    def one() -> Any:
        environment = _made_by(config, make, "step")
        if config.max_episode_steps:
            environment = gymnasium.wrappers.TimeLimit(environment, config.max_episode_steps * config.frame_skip)
        return _wrapped(environment, _wrappers(gymnasium, config))

    if _steps_them_here(config, config.mode):
        return SingleEnvironments([one] * count)
    kind = gymnasium.vector.AsyncVectorEnv if config.mode == "async" else gymnasium.vector.SyncVectorEnv
    return kind([one] * count, **_vector_options(gymnasium, config, config.mode))


def _made_by(config: EnvConfig, make: Callable[..., Any], has: str, **more: Any) -> Any:
    """What a user's factory makes of the options. Raises `ConfigError` when it fails or that is no environment."""
    try:
        made = make(**more, **config.options)
    except Exception as error:
        raise ConfigError("env.id", f"{config.id} failed: {type(error).__name__}: {error}") from error
    if not hasattr(made, has):
        kind = "a vector environment" if more else "an environment"
        raise ConfigError("env.id", f"{config.id} made a {type(made).__name__}, not {kind}")
    return made


def _envpool(task: str, config: EnvConfig, count: int) -> Any:
    try:
        import envpool
    except ImportError:
        raise MissingExtra("envpool", "envpool", f"env.id = envpool:{task}") from None
    options: dict[str, Any] = dict(config.options)
    if config.max_episode_steps:
        options["max_episode_steps"] = config.max_episode_steps
    try:
        pool = envpool.make(task, env_type="gymnasium", num_envs=count, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError("env.id", f"{config.id!r} cannot be made: {' '.join(str(error).split())}") from None
    return EnvPoolVector(pool, count)


class EnvPoolVector:
    """EnvPool behind the few methods of a `VectorEnv` that are used here. It ignores the seed of a reset: give `seed` in
    env.options."""

    def __init__(self, pool: Any, count: int) -> None:
        self.pool, self.num_envs = pool, count
        self.metadata = {"autoreset_mode": "NextStep"}
        self.single_observation_space, self.single_action_space = pool.observation_space, pool.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.pool.reset()

    def step(self, actions: Array) -> Any:
        return self.pool.step(actions.astype(self.single_action_space.dtype, copy=False))

    def close(self) -> None:
        self.pool.close()


_PLUGINS = (
    (re.compile(r"ALE/|.*NoFrameskip-v\d+$"), "ale_py", "ale-py", "atari"),
    (re.compile(r"Vizdoom"), "vizdoom.gymnasium_wrapper", "vizdoom", "vizdoom"),
    (re.compile(r"MiniGrid-|BabyAI-"), "minigrid", "minigrid", "minigrid"),
)
"""Ids -> the module whose import makes them known, its package, the extra that installs it."""
_PARTS = {"box2d": ("Box2D", "box2d"), "mujoco": ("mujoco", "mujoco")}
"""Parts of Gymnasium that need a package: -> the package, the extra."""
_DEEPMIND_LAB = re.compile(r"(?i)(deepmind_?lab|dmlab)\b|DeepmindLab")


def _register(gymnasium: Any, name: str) -> None:
    """Make an id known that a package brings. Raises `MissingExtra` for one that is not installed."""
    if _DEEPMIND_LAB.match(name):
        raise ConfigError(
            "env.id",
            f"{name!r}: DeepMind Lab is in no package index and cannot be installed with pip; nearest are ViZDoom's mazes "
            "(VizdoomMyWayHome-v1), or a build of your own behind pkg.module:make_env",
        )
    for pattern, module, package, extra in _PLUGINS:
        if pattern.match(name):
            try:
                __import__(module)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != module.partition(".")[0]:
                    raise
                raise MissingExtra(package, extra, f"env.id = {name}") from None


def _missing_part(gymnasium: Any, name: str) -> MissingExtra | None:
    """What a known id of Gymnasium's own needs that is not there."""
    spec = gymnasium.registry.get(name)
    part = str(spec.entry_point).split(".")[2] if str(getattr(spec, "entry_point", "")).count(".") > 2 else ""
    return MissingExtra(*_PARTS[part], f"env.id = {name}") if part in _PARTS else None
