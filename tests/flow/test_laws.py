"""The laws of the flow under random schedules with faults; a failure prints the plan that repeats it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Plan, assert_laws, simulate, simulate_crash
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from headrace.errors import ConservationError, NoEngines, Stalled, Starved
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.rollout.partial import VALID_PAIRS

FLOW_EXAMPLES = int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", "240"))

PAIRS = [(interruption, partial) for interruption, partials in VALID_PAIRS.items() for partial in partials]


@st.composite
def plans(draw) -> Plan:
    interruption, partial = draw(st.sampled_from(PAIRS))
    colocated = interruption != "never" and draw(st.booleans())
    ahead = 0 if colocated else draw(st.sampled_from([0, 1, 2, 4, None]))
    every = draw(st.integers(1, 3))
    every = min(every, 1 + ahead) if ahead is not None else every
    size = draw(st.integers(1, 4))
    lag = draw(st.sampled_from([None, None, every - 1, every, every + 3]))
    moments = st.lists(st.floats(0.5, 60.0), max_size=3).map(tuple)
    return Plan(
        seed=draw(st.integers(0, 10_000)),
        batch=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 6)),
        ahead=ahead,
        oversample=draw(st.integers(0, 2)),
        max_in_flight=draw(st.sampled_from([0, 0, 1, 3])),
        engines=draw(st.integers(1, 3)),
        group_size=size,
        min_complete=draw(st.integers(0, size)),
        group_timeout_s=draw(st.sampled_from([3.0, 30.0, 300.0])),
        retries=draw(st.integers(0, 3)),
        interruption=interruption,
        partial=partial,
        every_steps=every,
        max_version_lag=lag,
        on_stale=draw(st.sampled_from(["drop", "recycle"])),
        cancel_group=lag is not None and draw(st.booleans()),
        colocated=colocated,
        stream_groups=0 if colocated else draw(st.sampled_from([0, 0, 1, 2])),
        refill_limit=draw(st.sampled_from([0, 1, 4])),
        tasks=draw(st.sampled_from([None, None, 0, 1, 7])),
        train_s=draw(st.sampled_from([0.01, 0.5, 5.0])),
        score_s=draw(st.sampled_from([0.0, 0.1, 3.0])),
        costs=ScriptedCosts(
            length=draw(st.sampled_from([2.0, 20.0, 60.0])), length_sigma=draw(st.sampled_from([0.0, 0.5, 1.5]))
        ),
        drop_share=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        score_fails=draw(st.sampled_from([0.0, 0.0, 0.3])),
        slow_share=draw(st.sampled_from([0.0, 0.0, 0.5])),
        duplicates=draw(st.sampled_from([0.0, 0.0, 0.3])),
        lose_replies=draw(st.sampled_from([0.0, 0.0, 0.05])),
        kills_s=draw(moments),
        hang_s=draw(moments),
        stop_at_s=draw(st.sampled_from([None, None, 1.0, 20.0])),
        max_dropped=200,
        drain_timeout_s=draw(st.sampled_from([1.0, 60.0])),
    )


@settings(
    max_examples=FLOW_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="HEADRACE_FUZZ_EXAMPLES" not in os.environ,
)
@given(plans())
def test_every_schedule_keeps_the_laws_and_ends(plan: Plan):
    outcome = simulate(plan)
    note(repr(outcome.error))
    assert not isinstance(outcome.error, (ConservationError, Stalled)), outcome.error
    assert outcome.error is None or isinstance(outcome.error, (Starved, NoEngines)), repr(outcome.error)
    assert_laws(plan, outcome)
    assert outcome.controller.dispatcher.outstanding() == 0, "a request outlived its lease"


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="HEADRACE_FUZZ_EXAMPLES" not in os.environ,
)
@given(plans())
def test_every_schedule_repeats(plan: Plan):
    assert simulate(plan).log == simulate(plan).log


@settings(
    max_examples=max(30, FLOW_EXAMPLES // 3),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="HEADRACE_FUZZ_EXAMPLES" not in os.environ,
)
@given(plans(), st.integers(1, 2), st.integers(1, 5))
def test_a_run_whose_trainer_died_goes_on_from_its_checkpoint(plan: Plan, every: int, crash_at: int):
    """Nothing is trained twice after the checkpoint, no version names two contents, and no capacity is lost."""
    plan = replace(plan, checkpoint_every=every, crash_at=crash_at)
    with TemporaryDirectory() as folder:
        before, after, saved = simulate_crash(plan, Path(folder))
    note(repr(before.error))
    assert not before.controller.ledger.in_flight, "every lease of the broken run has an end"
    if after is None:
        return
    note(repr(after.error))
    assert after.error is None or isinstance(after.error, (Starved, NoEngines)), repr(after.error)
    ledger, held = after.controller.ledger, len(saved["flow"]["running"]) + len(saved["flow"]["ready"])
    assert ledger.submitted == ledger.trained + sum(ledger.dropped.values()) and not ledger.in_flight
    if not after.error:
        assert ledger.trained == saved["trained"] + sum(map(len, after.learner.batches))
    assert not set(after.watcher.written) & set(before.watcher.written), "a number names one content"
    if plan.ahead is not None and not plan.max_in_flight:
        most = (1 + plan.ahead) * plan.batch + plan.oversample
        assert saved["room"] <= most and (saved["room"] > 0 or held >= 1)
    trained = [unit.group_id for batch in after.learner.batches for unit in batch]
    assert len(set(trained)) == len(trained)
    assert after.controller.dispatcher.outstanding() == 0
