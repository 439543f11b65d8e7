"""A trajectory from outside into what is wrong with it, if anything: the trainer must be able to take it for what it says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from headrace.policies.spaces import Spaces
from headrace.types import NO_VERSION, Array, Trajectory


def flaw(
    unit: object, spaces: Spaces, steps: int, count: int, newest: int, memory: Mapping[str, int] = MappingProxyType({})
) -> str:
    """Empty for T = `steps` of N = `count` environments with these spaces, of versions up to `newest`.

    memory: sizes of the policy's states by name
    """
    if not isinstance(unit, Trajectory):
        return f"it is a {type(unit).__name__}, no trajectory"
    grid = (steps, count)
    expected: list[tuple[str, Array, tuple[int, ...], str]] = [
        ("rewards", unit.rewards, grid, "float32"),
        ("terminated", unit.terminated, grid, "bool"),
        ("truncated", unit.truncated, grid, "bool"),
        ("valid", unit.valid, grid, "bool"),
        ("behavior_logprobs", unit.behavior_logprobs, grid, "float32"),
        ("policy_versions", unit.policy_versions, grid, "int32"),
        ("actions", unit.actions, grid + _action_shape(spaces), "float32" if spaces.action.kind == "box" else "int64"),
    ]
    if unit.ended.ndim != 2 or unit.ended.shape[1] != 2 or unit.ended.dtype != np.int64:
        return f"ended is {unit.ended.dtype} {list(unit.ended.shape)}, expected int64 [K, 2]"
    ends = len(unit.ended)
    for name, leaves, shape in (
        ("observations", unit.observations, (steps + 1, count)),
        ("final_observations", unit.final_observations, (ends,)),
    ):
        wanted = {leaf.name for leaf in spaces.leaves} if ends or name == "observations" else set()
        if set(leaves) != wanted:
            return f"{name} are {sorted(leaves)}, expected {sorted(wanted)}"
        expected += [
            (f"{name}.{leaf.name}", leaves[leaf.name], shape + leaf.shape, leaf.dtype)
            for leaf in spaces.leaves
            if leaf.name in leaves
        ]
    states = unit.initial_state or {}
    if set(states) != set(memory):
        return f"initial_state has {sorted(states)}, expected {sorted(memory)}"
    expected += [(f"initial_state.{name}", states[name], (count, size), "float32") for name, size in memory.items()]
    for name, values, shape, dtype in expected:
        if values.shape != shape or values.dtype != np.dtype(dtype):
            return f"{name} is {values.dtype} {list(values.shape)}, expected {dtype} {list(shape)}"
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return f"{name} is not finite"
    return _ranges(unit, spaces, newest)


def _action_shape(spaces: Spaces) -> tuple[int, ...]:
    return (len(spaces.action.low),) if spaces.action.kind == "box" else spaces.action.shape


def _ranges(unit: Trajectory, spaces: Spaces, newest: int) -> str:
    """Numbers that index something later on."""
    if (unit.terminated & unit.truncated).any():
        return "a step is terminated and truncated"
    if unit.policy_versions.min() <= NO_VERSION or unit.policy_versions.max() > newest:
        return f"policy_versions go from {unit.policy_versions.min()} to {unit.policy_versions.max()}, the newest is {newest}"
    steps, count = unit.rewards.shape
    if (unit.ended < 0).any() or (unit.ended >= (steps, count)).any():
        return "ended names steps that are not there"
    returns, lengths = unit.episode_returns, unit.episode_lengths
    if returns.ndim != 1 or returns.shape != lengths.shape or not np.isfinite(returns).all():
        return "episode_returns and episode_lengths do not fit each other"
    if (
        spaces.action.kind == "discrete"
    ):  # as sampled: counted from zero, whatever the environment's own first action is
        chosen = unit.actions.reshape(-1, len(spaces.action.sizes))
        if (chosen < 0).any() or (chosen >= spaces.action.sizes).any():
            return f"actions are not below {list(spaces.action.sizes)}"
    for leaf in spaces.leaves:
        for values in (unit.observations[leaf.name], unit.final_observations.get(leaf.name)):
            if leaf.sizes and values is not None:
                shown = values.reshape(-1, len(leaf.sizes)) - np.array(leaf.starts)
                if (shown < 0).any() or (shown >= leaf.sizes).any():
                    return f"observations {leaf.name!r} are not below {list(leaf.sizes)}"
    return ""
