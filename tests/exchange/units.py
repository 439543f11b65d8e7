"""Small units and buffers for the tests of the exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.ledger import Ledger
from headrace.exchange.replay import ReplayBuffer
from headrace.exchange.staleness import Capacity, VersionLine
from headrace.exchange.stores import open_store
from headrace.exchange.stores.replay import ReplayStore
from headrace.protocols import Store
from headrace.simulation.parts import NumberedTasks
from headrace.types import Episode, Group, SamplingParams, Score, Task, TokenSample, Trajectory


def group(name: str, version: int = 0, tokens: int = 4, members: int = 1) -> Group:
    """A scored group whose tokens are all of one version."""
    episodes = tuple(
        Episode(
            episode_id=f"{name}/{member}",
            samples=(
                TokenSample(
                    sample_id=f"{name}/{member}",
                    token_ids=np.arange(tokens, dtype=np.int64),
                    loss_mask=np.ones(tokens, dtype=np.int8),
                    behavior_logprobs=np.linspace(-1, 0, tokens, dtype=np.float32),
                    policy_versions=np.full(tokens, version, dtype=np.int64),
                    sampling=SamplingParams(seed=7),
                    finish_reason="stop",
                ),
            ),
        )
        for member in range(members)
    )
    task = Task(task_id=name, source="test", payload={"prompt": "1 + 1 =", "answer": "2"})
    scores = tuple(Score(reward=1.0, parts={"exact": 1.0}) for _ in episodes)
    return Group(group_id=name, task=task, expected_size=members, episodes=episodes, scores=scores)


def unit_for(store: Store, name: str, version: int = 0) -> Group | Trajectory:
    """A unit of the kind that the store moves."""
    if not isinstance(store, ReplayStore):
        return group(name, version)
    grid = np.zeros((3, 2), dtype=np.float32)
    return Trajectory(
        sample_id=name,
        observations={"obs": np.zeros((4, 2, 1), dtype=np.float32)},
        actions=grid,
        rewards=grid,
        terminated=grid.astype(bool),
        truncated=grid.astype(bool),
        valid=np.ones_like(grid, dtype=bool),
        behavior_logprobs=grid,
        policy_versions=np.full(grid.shape, version),
    )


def buffer(
    *,
    batch: int = 2,
    ahead: int | None = 1,
    tasks: int | None = None,
    store: Store | None = None,
    oversample: int = 0,
    max_in_flight: int = 0,
    **more: Any,
) -> LeaseBuffer:
    kind = ReplayBuffer if isinstance(store, ReplayStore) else LeaseBuffer
    return kind(
        NumberedTasks(tasks),
        store or open_store("memory", 0, ""),
        Ledger(),
        VersionLine(),
        Capacity(batch=batch, ahead=ahead, oversample=oversample, max_in_flight=max_in_flight),
        **more,
    )
