"""A trajectory from outside into what is wrong with it, if anything: the trainer must be able to take it for what it says."""

from __future__ import annotations

import numpy as np

from headrace.policies.spaces import Spaces
from headrace.types import NO_VERSION, Array, Trajectory


def flaw(unit: object, spaces: Spaces, steps: int, count: int, newest: int, recurrent: int = 0) -> str:
    """Empty for T = `steps` of N = `count` environments with these spaces, of versions up to `newest`.

    recurrent: size of the policy's memory; 0: it has none
    """
    if not isinstance(unit, Trajectory):
        return f"it is a {type(unit).__name__}, no trajectory"
    grid = (steps, count)
    expected: list[tuple[str, Array | None, tuple[int, ...], str]] = [
        ("rewards", unit.rewards, grid, "f"),
        ("terminated", unit.terminated, grid, "b"),
        ("truncated", unit.truncated, grid, "b"),
        ("valid", unit.valid, grid, "b"),
        ("behavior_logprobs", unit.behavior_logprobs, grid, "f"),
        ("policy_versions", unit.policy_versions, grid, "i"),
        ("actions", unit.actions, grid + _action_shape(spaces), "f" if spaces.action.kind == "box" else "i"),
    ]
    ends = len(unit.ended)
    for name, leaves, shape in (
        ("observations", unit.observations, (steps + 1, count)),
        ("final_observations", unit.final_observations, (ends,)),
    ):
        wanted = {leaf.name for leaf in spaces.leaves} if ends or name == "observations" else set()
        if set(leaves) != wanted:
            return f"{name} are {sorted(leaves)}, expected {sorted(wanted)}"
        expected += [
            (f"{name}.{leaf.name}", leaves[leaf.name], shape + leaf.shape, np.dtype(leaf.dtype).kind)
            for leaf in spaces.leaves
            if leaf.name in leaves
        ]
    expected += [(f"initial_state.{k}", v, (count, recurrent), "f") for k, v in (unit.initial_state or {}).items()]
    for name, values, shape, kind in expected:
        if values is None or values.shape != shape or values.dtype.kind != kind:
            found = "nothing" if values is None else f"{values.dtype} {list(values.shape)}"
            return f"{name} is {found}, expected kind {kind!r} {list(shape)}"
        if kind == "f" and not np.isfinite(values).all():
            return f"{name} is not finite"
    return _ranges(unit, spaces, newest, bool(recurrent))


def _action_shape(spaces: Spaces) -> tuple[int, ...]:
    return (len(spaces.action.low),) if spaces.action.kind == "box" else spaces.action.shape


def _ranges(unit: Trajectory, spaces: Spaces, newest: int, recurrent: bool) -> str:
    """Numbers that index something later on."""
    if recurrent != bool(unit.initial_state):
        return f"initial_state is {'missing' if recurrent else 'there'}"
    if (unit.terminated & unit.truncated).any():
        return "a step is terminated and truncated"
    if unit.policy_versions.min() <= NO_VERSION or unit.policy_versions.max() > newest:
        return f"policy_versions go from {unit.policy_versions.min()} to {unit.policy_versions.max()}, the newest is {newest}"
    steps, count = unit.rewards.shape
    if len(unit.ended) and (
        unit.ended.shape[1:] != (2,)
        or unit.ended.dtype.kind != "i"
        or (unit.ended < 0).any()
        or (unit.ended >= (steps, count)).any()
    ):
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
