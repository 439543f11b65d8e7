"""Turns a policy into the returns of whole episodes, in environments of their own, that train nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import torch

from headrace.errors import PartFailed
from headrace.rollout.engines.policy_network import PolicyNetworkEngine
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment
from headrace.types import Array, Episodes

LONGEST = 100_000
"""Steps after which an episode counts as it stands: a greedy policy may stand still for ever where there is no time limit."""


def shares(episodes: int, environments: int) -> Array:
    """[N] how many episodes each environment plays. Fixed beforehand: the first ones to end would be the short ones."""
    each, more = divmod(episodes, environments)
    return np.full(environments, each) + (np.arange(environments) < more)


@torch.no_grad()
async def play(
    engine: PolicyNetworkEngine,
    environments: VectorEnvironment,
    wanted: Array,
    greedy: bool,
    seed: int,
    stepped: Callable[[int], Awaitable[None]],
) -> Episodes:
    """wanted: [N] episodes of each environment. greedy: the likeliest action, else one drawn, from a generator of its own.
    stepped: awaited after each step with the number of environments. Raises `PartFailed` for a reward that is not finite."""
    network, distribution, count = engine.network, engine.distribution, environments.count
    device = engine.generator.device
    generator = torch.Generator(device).manual_seed(seed)
    observations, state = environments.reset(), network.initial_state(count)
    left, returns, lengths = wanted.copy(), np.zeros(count), np.zeros(count, np.int64)
    played: list[tuple[float, int, int]] = []
    while left.any():
        leaves = {name: torch.from_numpy(np.ascontiguousarray(leaf)).to(device) for name, leaf in observations.items()}
        outputs, state = network.act(leaves, state)
        noise = distribution.noise((count,), generator)
        actions = distribution.mode(outputs) if greedy else distribution.sample(outputs, noise)
        result = environments.step(distribution.to_environment(actions.numpy(force=True)))
        if not np.isfinite(result.rewards).all():
            raise PartFailed(f"{environments.config.id} gave a reward that is not finite")
        observations = result.observations
        returns += result.rewards
        lengths += result.valid
        done = result.terminated | result.truncated
        for n in np.flatnonzero((done | (lengths >= LONGEST)) & (left > 0)):
            played.append((float(returns[n]), int(lengths[n]), engine.version))
            left[n] = left[n] - 1 if done[n] else 0
        returns[done], lengths[done] = 0.0, 0
        begins = done if environments.mode != "next_step" else ~result.valid
        if state and begins.any():
            keep = torch.from_numpy(~begins).to(torch.float32)[:, None]
            state = {name: value * keep for name, value in state.items()}
        await stepped(count)
    found, steps, versions = zip(*played, strict=True)
    return Episodes(returns=np.array(found), lengths=np.array(steps), policy_versions=np.array(versions))
