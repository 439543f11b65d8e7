"""Small units and buffers for the tests of the exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.ledger import Ledger
from headrace.exchange.staleness import Capacity, VersionLine
from headrace.exchange.stores import open_store
from headrace.protocols import Store
from headrace.simulation.parts import NumberedTasks
from headrace.types import Episode, Group, SamplingParams, Score, Task, TokenSample


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
    return LeaseBuffer(
        NumberedTasks(tasks),
        store or open_store("memory", 0, ""),
        Ledger(),
        VersionLine(),
        Capacity(batch=batch, ahead=ahead, oversample=oversample, max_in_flight=max_in_flight),
        **more,
    )
