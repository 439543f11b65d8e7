"""Turns `[env]` into environments side by side: a Gymnasium id, a user's factory, an EnvPool task or a simulator of our own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, MissingExtra
from headrace.imports import import_object
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.single_environments import SingleEnvironments
from headrace.types import Array

_ID = re.compile(r"-v\d+$")


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


def stacks_itself(environments: Any) -> bool:
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
