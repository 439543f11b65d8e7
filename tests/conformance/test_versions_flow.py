"""Cases V of the flow: versions, lag, room and leases, over the real orchestrator on a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from exchange.units import buffer, group
from flow.harness import Plan, assert_laws, simulate
from headrace.errors import Starved
from headrace.exchange.staleness import Capacity
from headrace.rollout.engines.scripted import ScriptedCosts


async def test_v2_time_in_the_queue_counts_as_lag():
    """Start v3, end v3, used at v6, limit 2: dropped, with lag 3."""
    made = buffer(batch=1, ahead=5, tasks=1, max_version_lag=2)
    made.versions.version = 3
    lease = await made.admit()
    made.put(lease, group("a", version=3))
    made.versions.version = 6
    assert made.versions.lag(3) == 3
    assert made.room() > 0 and made._next_lease() is None, "the source has ended"
    assert await made.take(1, 6) == []
    assert lease.outcome == "stale" and dict(made.ledger.dropped) == {"stale": 1}


@pytest.mark.parametrize("version", [0, 10, 1000])
def test_v3_room_does_not_grow_with_the_version(version):
    """`max_steps_ahead` 2, batches of 4, restored at version 10 with nothing accepted: 12, not 52."""
    made = buffer(batch=4, ahead=2)
    made.versions.version = version
    made.versions.restore(version)
    assert made.room() == 12
    assert Capacity(batch=4, ahead=2).room(running=0, held=0) == 12


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("ahead", [0, 2])
def test_v4_groups_filtered_at_random_up_to_all_of_them_leak_no_room(share, ahead):
    plan = Plan(drop_share=share, steps=8, ahead=ahead, max_dropped=200)
    outcome = simulate(plan)
    assert_laws(plan, outcome)
    ledger = outcome.controller.ledger
    assert ledger.dropped["filtered"] > 0
    if share == 1.0:
        assert isinstance(outcome.error, Starved) and not ledger.trained
    else:
        assert outcome.error is None and outcome.controller.step == 8
    assert outcome.controller.buffer.capacity.room(running=0, held=len(ledger.in_flight)) == (1 + ahead) * plan.batch


def test_v6_a_generation_interrupted_many_times_keeps_one_budget():
    plan = Plan(
        interruption="abort",
        partial="resume_prefix",
        batch=1,
        ahead=11,
        steps=40,
        train_s=0.05,
        costs=ScriptedCosts(length=60, length_sigma=0.8, token_s=0.1),
    )
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    samples = [episode.samples[0] for b in outcome.learner.batches for g in b for episode in g.episodes]
    interrupted = [s for s in samples if len(np.unique(s.policy_versions[s.loss_mask == 1])) > 2]
    assert interrupted, "some were cut at least twice"
    assert max(s.completion_length for s in samples) == 64 == max(s.completion_length for s in interrupted)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("min_complete", [0, 1])
def test_v7_a_worker_that_dies_in_mid_group_does_not_leave_the_trainer_waiting(engines, min_complete):
    plan = Plan(
        engines=engines,
        min_complete=min_complete,
        steps=10,
        kills_s=(3.1, 8.3, 13.7),
        costs=ScriptedCosts(length=50, length_sigma=0.2),
    )
    outcome = simulate(plan)
    assert outcome.error is None, outcome.error
    assert_laws(plan, outcome)
    assert sum(event.kind == "fenced" for event in outcome.log) == 3
    assert outcome.controller.ledger.trained == 10 * plan.batch
    assert outcome.seconds < 200, "within the time limit of a group"


@pytest.mark.parametrize("every_steps", [1, 2, 3])
def test_v8_a_batch_is_one_version_however_the_weights_travel(every_steps):
    plan = Plan(steps=7, every_steps=every_steps, ahead=2)
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    assert outcome.controller.versions.version == 7
    assert [report.version for report in outcome.watcher.reports] == list(range(1, 8))
    assert outcome.learner.published == [v for v in range(8) if v % every_steps == 0 or v == 7]
