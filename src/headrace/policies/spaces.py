"""Turns Gymnasium spaces into plain descriptions that travel between processes, and batched observations into named leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headrace.errors import ConfigError
from headrace.types import Array

PLAIN = "obs"
"""Name of the only leaf of a space that is no Dict or Tuple."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of an observation.

    kind: vector (any Box that is no image), image ([H, W, C], [C, H, W], or several stacked in front), discrete (whole numbers, one or several),
        binary
    shape: of one observation; sizes: how many values each number of a discrete leaf has, starts: its lowest
    """

    name: str
    kind: Literal["vector", "image", "discrete", "binary"]
    shape: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What the policy head has to produce.

    discrete: one number (shape ()) or several ([k]), each of `sizes` values from `starts` on
    box: [k] real numbers between low and high (infinite where there is no bound); `shape` is the environment's own
    """

    kind: Literal["discrete", "box"]
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dtype: str = "int64"


@dataclass(frozen=True, slots=True)
class Spaces:
    """What an environment shows and takes."""

    leaves: tuple[Leaf, ...]
    action: ActionSpec


def describe_spaces(observation: Any, action: Any) -> Spaces:
    """The *single* spaces of an environment (a batched Discrete looks like a MultiDiscrete). Texts within a Dict or Tuple are
    left out (a mission that is put in words). Raises `ConfigError`."""
    return Spaces(tuple(_leaves("", observation)), _action(action))


def _leaves(name: str, space: Any) -> list[Leaf]:
    from gymnasium import spaces

    match space:
        case spaces.Dict():
            parts = space.spaces.items()
            return [leaf for key, part in parts for leaf in _leaves(f"{name}/{key}" if name else str(key), part)]
        case spaces.Tuple():
            parts = enumerate(space.spaces)
            return [leaf for key, part in parts for leaf in _leaves(f"{name}/{key}" if name else str(key), part)]
    if name and space.dtype is not None and np.dtype(space.dtype).kind == "U":
        return []
    name, dtype = name or PLAIN, str(space.dtype)
    match space:
        case spaces.Box():
            kind = "image" if _is_image(space) else "vector"
            return [Leaf(name, kind, tuple(space.shape), dtype)]  # type: ignore[arg-type]
        case spaces.Discrete():
            return [Leaf(name, "discrete", (), dtype, (int(space.n),), (int(space.start),))]
        case spaces.MultiDiscrete():
            sizes, starts = space.nvec.reshape(-1), np.broadcast_to(space.start, space.nvec.shape).reshape(-1)
            return [Leaf(name, "discrete", tuple(space.shape), dtype, tuple(sizes.tolist()), tuple(starts.tolist()))]
        case spaces.MultiBinary():
            return [Leaf(name, "binary", tuple(space.shape), dtype)]
    raise ConfigError(
        "env.id",
        f"its observation {name!r} is a {type(space).__name__}, which no network here reads (Box, Discrete, MultiDiscrete, "
        "MultiBinary, and Dict and Tuple of them are); wrap the environment",
    )


def _is_image(space: Any) -> bool:
    """Three axes, two of them long, or several such stacked; or two long axes of bytes."""
    shape = space.shape[-3:] if len(space.shape) == 4 else space.shape
    if len(shape) == 2:
        return space.dtype == np.uint8 and min(shape) >= 8
    return len(shape) == 3 and sorted(shape)[1] >= 8


def _action(space: Any) -> ActionSpec:
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            return ActionSpec("discrete", (), (int(space.n),), (int(space.start),))
        case spaces.MultiDiscrete():
            sizes, starts = space.nvec.reshape(-1), np.broadcast_to(space.start, space.nvec.shape).reshape(-1)
            return ActionSpec("discrete", tuple(space.shape), tuple(sizes.tolist()), tuple(starts.tolist()))
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            low, high = (tuple(bound.reshape(-1).astype(float).tolist()) for bound in (space.low, space.high))
            return ActionSpec("box", tuple(space.shape), low=low, high=high, dtype=str(space.dtype))
    raise ConfigError(
        "env.id", f"its actions are a {type(space).__name__}; Discrete, MultiDiscrete and Box are supported; wrap it"
    )


def leaves_of(observation: Any) -> dict[str, Array]:
    """A batched observation as named leaves [N, ...]."""
    if isinstance(observation, np.ndarray):
        return {PLAIN: observation}
    found: dict[str, Array] = {}
    _collect("", observation, found)
    return found


def _collect(name: str, value: Any, found: dict[str, Array]) -> None:
    if isinstance(value, dict | tuple | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _collect(f"{name}/{key}" if name else str(key), part, found)
    else:
        found[name or PLAIN] = np.asarray(value)
