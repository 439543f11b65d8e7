"""The laws of the flow over every real store, faults included, on a real clock: few schedules, drawn by their seed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random

import pytest
from harness import Outcome, Plan, RecordingLearner, assert_laws, flow_of

from exchange.faulty_store import Faults, FaultyStore
from headrace.errors import Starved
from headrace.exchange.stores import AVAILABLE, open_store
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.rollout.partial import VALID_PAIRS
from headrace.simulation.parts import NumberedTasks, Watcher
from headrace.simulation.run import run_flow

PAIRS = [(interruption, partial) for interruption, partials in VALID_PAIRS.items() for partial in partials]
SCHEDULES = max(4, int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", "0")) // 100)
COSTS = ScriptedCosts(token_s=2e-4, prefill_s=1e-3, prepare_s=2e-3, commit_s=1e-4)


def draw(seed: int) -> tuple[Plan, Faults]:
    rng = random.Random(seed)
    interruption, partial = rng.choice(PAIRS)
    plan = Plan(
        seed=seed,
        batch=rng.randint(1, 4),
        steps=rng.randint(2, 5),
        ahead=rng.choice([0, 1, 3, None]),
        oversample=rng.randint(0, 2),
        group_size=rng.randint(1, 3),
        interruption=interruption,
        partial=partial,
        max_version_lag=rng.choice([None, 0, 2]),
        on_stale=rng.choice(["drop", "recycle"]),
        tasks=rng.choice([None, None, 9]),
        train_s=rng.choice([0.001, 0.02]),
        score_s=rng.choice([0.0, 0.002]),
        costs=COSTS,
        drop_share=rng.choice([0.0, 0.3]),
        lose_replies=0.0,
        kills_s=(),
        max_dropped=300,
        drain_timeout_s=5.0,
        stall_stop_s=60.0,
    )
    faults = Faults(
        refuse=rng.choice([0.0, 0.3]),
        full=rng.choice([0.0, 0.1]),
        slow=rng.choice([0.0, 0.2]),
        twice=rng.choice([0.0, 0.2]),
        lose=rng.choice([0.0, 0.15]),
    )
    return plan, faults


def run_on(plan: Plan, store: FaultyStore) -> Outcome:
    watcher, source, learner = Watcher(), NumberedTasks(plan.tasks), RecordingLearner(plan)
    flow = dataclasses.replace(flow_of(plan, watcher, source, learner), store=store)

    async def bounded():
        async with asyncio.timeout(60):
            return await run_flow(flow)

    ended = asyncio.run(bounded())
    return Outcome(ended.controller, watcher, learner, source, ended.state, ended.error, ended.seconds)


def check(plan: Plan, outcome: Outcome) -> None:
    assert outcome.error is None or isinstance(outcome.error, Starved), (plan, outcome.error)
    assert_laws(plan, outcome)


@pytest.mark.parametrize("seed", range(SCHEDULES))
@pytest.mark.parametrize("kind", AVAILABLE)
def test_every_store_keeps_the_laws_whatever_goes_wrong_in_it(kind, seed, tmp_path, request):
    plan, faults = draw(seed)
    url = request.getfixturevalue("redis_server").url if kind == "redis" else ""
    inner = open_store(kind, 0 if seed % 2 else 20_000, str(tmp_path), url, keep_acknowledged=seed > 1)
    store = FaultyStore(inner, faults, seed)
    outcome = run_on(plan, store)
    check(plan, outcome)
    assert outcome.controller.ledger.dropped["lost"] <= store.done.get("lose", 0)
    kept = set(store.acknowledged())
    store.close()
    if kind in ("files", "redis"):
        again = open_store(kind, 0, str(tmp_path), url)
        assert set(again.scan()) == kept, "what no checkpoint has counted as ended, and nothing else"
        for key in again.scan():
            again.acknowledge(key)
        again.forget(again.acknowledged())
        again.close()


def test_a_redis_server_that_restarts_in_mid_flow_costs_nothing(own_redis, tmp_path):
    plan, _ = draw(1)
    plan = dataclasses.replace(plan, steps=6, batch=3, tasks=None, max_version_lag=None, drop_share=0.0)
    store = FaultyStore(
        open_store("redis", 0, str(tmp_path), own_redis.url), Faults(at=(7, own_redis.restart)), plan.seed
    )
    outcome = run_on(plan, store)
    check(plan, outcome)
    assert outcome.error is None and outcome.controller.ledger.trained == 18
    assert not outcome.controller.ledger.dropped["lost"]
    store.close()


def test_the_faults_of_these_schedules_do_happen():
    drawn = [draw(seed)[1] for seed in range(4)]
    for name in ("refuse", "full", "slow", "twice", "lose"):
        assert any(getattr(faults, name) for faults in drawn), name
