"""How much is learned from a replay, when, and with which weights."""

from __future__ import annotations

import numpy as np
import pytest

from exchange.test_replay import replay, trajectory
from headrace.exchange.config import ReplayConfig
from headrace.orchestrator.replay_learner import ReplayLearner
from headrace.types import Stat


class Trainer:
    def __init__(self):
        self.draws = []

    async def update(self, drawn):
        self.draws.append(drawn)
        return {"loss/total": Stat(1.0)}, np.full(len(drawn.serials), 7.0)


async def step(made, learner, **shape):
    lease = await made.admit()
    made.put(lease, trajectory(lease.lease_id, **shape))
    [(lease, unit)] = await made.take(1, made.versions.version)
    metrics = await learner.train([unit])
    made.mark_trained([lease])
    made.versions.advance()
    made.settle(lease, "trained")
    return metrics


async def test_updates_are_paid_for_by_steps_once_the_replay_holds_enough():
    made, trainer = replay(capacity=200), Trainer()
    config = ReplayConfig(learning_starts=17, draw=5, updates_per_step=0.2, n_steps=2)
    learner = ReplayLearner(trainer, made, config, None, batches=10)
    done = [(await step(made, learner))["replay/updates"].total for _ in range(6)]
    assert done == [0, 0, 1, 2, 1, 2], "8 steps a batch owe 1.6 updates"
    assert all(drawn.rewards.shape == (5, 2) for drawn in trainer.draws)
    metrics = await step(made, learner)
    assert metrics["loss/total"].total == 2 and metrics["replay/resident_units"].total == 7
    assert {unit_uses > 0 for unit_uses in map(made.store.uses, made.store.scan())} == {True}


@pytest.mark.parametrize("priority, first, last", [(0.0, 0.0, 0.0), (0.5, 0.4, 1.0)])
async def test_importance_rises_to_one_over_the_run(priority, first, last):
    made = replay(capacity=200, exponent=priority)
    learner = ReplayLearner(Trainer(), made, ReplayConfig(priority=priority), None, batches=4)
    assert learner._importance() == first
    for _ in range(4):
        made.versions.advance()
    assert learner._importance() == last


async def test_errors_become_priorities():
    made, trainer = replay(capacity=200, exponent=1.0), Trainer()
    learner = ReplayLearner(
        trainer, made, ReplayConfig(learning_starts=0, draw=8, updates_per_step=0.125, priority=1.0), None, batches=10
    )
    await step(made, learner)
    assert made.store._tree.total == pytest.approx(8 * 7.0, rel=1e-5)
