"""The flow on a virtual clock: what a schedule must do, one rule a test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Plan, assert_laws, simulate

from headrace.errors import NoEngines, Starved
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.rollout.partial import VALID_PAIRS


def test_a_run_trains_its_steps_and_ends_every_lease():
    plan = Plan(steps=8)
    outcome = simulate(plan)
    assert outcome.error is None and outcome.state == "finished"
    assert_laws(plan, outcome)
    assert outcome.controller.ledger.trained == 8 * plan.batch
    assert outcome.watcher.written == list(range(9)), "each version is written before it is sent"


def test_the_same_seed_gives_the_same_event_log():
    plan = Plan(steps=5, kills_s=(3.0,), lose_replies=0.05, interruption="abort", partial="resume_prefix")
    assert simulate(plan).log == simulate(plan).log
    assert simulate(plan).log != simulate(replace(plan, seed=1)).log


@pytest.mark.parametrize("interruption, partial", [(i, p) for i, ps in VALID_PAIRS.items() for p in ps])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_valid_pair_keeps_the_laws(interruption, partial, ahead):
    costs = ScriptedCosts(length=40, length_sigma=1.0)
    plan = Plan(interruption=interruption, partial=partial, ahead=ahead, steps=8, costs=costs, train_s=0.3)
    outcome = simulate(plan)
    assert outcome.error is None, outcome.error
    assert_laws(plan, outcome)


def test_sync_alternates_and_every_token_is_of_the_version_trained_next():
    plan = Plan(ahead=0, steps=6)
    outcome = simulate(plan)
    assert_laws(plan, outcome)
    for version, batch in enumerate(outcome.learner.batches):
        assert {int(v) for g in batch for e in g.episodes for v in e.samples[0].policy_versions if v >= 0} == {version}


def test_a_swap_under_never_leaves_generations_of_two_versions():
    plan = Plan(ahead=2, steps=8, costs=ScriptedCosts(length=60, length_sigma=0.1), train_s=0.2)
    outcome = simulate(plan)
    assert_laws(plan, outcome)
    mixed = [
        len({int(v) for v in episode.samples[0].policy_versions if v >= 0}) > 1
        for batch in outcome.learner.batches
        for group in batch
        for episode in group.episodes
    ]
    assert any(mixed), "nothing ever stopped, so some generation met a swap"


@pytest.mark.parametrize("interruption", ["drain", "barrier"])
def test_drained_syncs_leave_no_mixed_generation(interruption):
    plan = Plan(ahead=2, steps=8, interruption=interruption, partial="none", train_s=0.2)
    outcome = simulate(plan)
    assert_laws(plan, outcome)
    for batch in outcome.learner.batches:
        for group in batch:
            for episode in group.episodes:
                assert len({int(v) for v in episode.samples[0].policy_versions if v >= 0}) == 1


def test_an_interrupted_generation_keeps_its_prefix_and_its_budget():
    costs = ScriptedCosts(length=64, length_sigma=0.0)
    plan = Plan(interruption="abort", partial="resume_prefix", ahead=3, steps=10, train_s=0.1, costs=costs)
    outcome = simulate(plan)
    assert_laws(plan, outcome)
    lengths = {e.completion_length for b in outcome.learner.batches for g in b for e in g.episodes}
    assert lengths == {64}


def test_groups_dropped_at_random_up_to_all_of_them_never_leak_room():
    plan = Plan(drop_share=0.5, steps=6)
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    assert outcome.controller.ledger.dropped["filtered"] > 0
    starved = simulate(Plan(drop_share=1.0, steps=3, max_dropped=10))
    assert isinstance(starved.error, Starved) and "zero_variance" in str(starved.error)
    assert_laws(plan, starved)


def test_beyond_the_refill_limit_a_step_trains_on_what_it_has_and_never_on_nothing():
    plan = Plan(drop_share=0.8, steps=5, refill_limit=1)
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    sizes = [len(batch) for batch in outcome.learner.batches]
    assert min(sizes) >= 1 and any(size < plan.batch for size in sizes)
    nothing = simulate(Plan(drop_share=1.0, steps=3, max_dropped=64))
    assert isinstance(nothing.error, Starved) and not nothing.learner.batches


def test_a_streaming_trainer_starts_before_its_batch_is_complete():
    costs = ScriptedCosts(length=40, length_sigma=1.0)
    waited = simulate(Plan(steps=8, ahead=0, train_s=2.0, costs=costs))
    plan = Plan(steps=8, ahead=0, train_s=2.0, costs=costs, stream_groups=1)
    streamed = simulate(plan)
    assert streamed.error is None
    assert_laws(plan, streamed)
    assert streamed.seconds < waited.seconds - 2.0, "training hid behind the longest generation"


@pytest.mark.parametrize("on_stale", ["drop", "recycle"])
@pytest.mark.parametrize("interruption, partial", [("never", "continue"), ("abort", "resume_prefix")])
def test_running_groups_that_are_too_old_already_are_given_up(interruption, partial, on_stale):
    costs = ScriptedCosts(length=60, length_sigma=1.5, token_s=0.1)
    plan = Plan(
        ahead=4, max_version_lag=0, cancel_group=True, on_stale=on_stale, interruption=interruption, partial=partial,
        steps=15, costs=costs, train_s=0.2,
    )  # fmt: skip
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    assert outcome.watcher.drops["cancelled" if on_stale == "drop" else "recycled"] > 0
    assert outcome.controller.dispatcher.outstanding() == 0
    kept = simulate(replace(plan, cancel_group=False))
    assert outcome.watcher.drops["stale"] < kept.watcher.drops["stale"] or on_stale == "recycle"


def test_a_group_is_given_up_only_when_its_tokens_are_known_to_be_old():
    """With a lag that nothing reaches, cancel_group changes nothing at all."""
    plan = Plan(ahead=2, max_version_lag=50, steps=10)
    plain, watched = simulate(plan), simulate(replace(plan, cancel_group=True))
    assert watched.watcher.drops == plain.watcher.drops
    assert [[g.group_id for g in b] for b in watched.learner.batches] == [
        [g.group_id for g in b] for b in plain.learner.batches
    ]


def test_an_engine_that_dies_is_replaced_and_its_work_is_done_again():
    plan = Plan(steps=10, kills_s=(3.0, 6.0))
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    assert sum(event.kind == "fenced" for event in outcome.log) == 2
    assert sum(event.kind == "joined" for event in outcome.log) == 2


def test_the_last_engine_gone_without_replacement_ends_the_run_with_a_reason():
    outcome = simulate(Plan(engines=1, restarts=0, kills_s=(3.0,)))
    assert isinstance(outcome.error, NoEngines)
    assert_laws(Plan(engines=1), outcome)


def test_an_engine_that_hangs_in_a_sync_is_fenced_and_the_rest_goes_on():
    plan = Plan(engines=3, steps=10, hang_s=(4.0,))
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    assert any(event.kind == "fenced" for event in outcome.log)


def test_lost_replies_are_done_again():
    plan = Plan(steps=6, lose_replies=0.1)
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    assert outcome.controller.dispatcher.ignored_replies > 0


def test_a_finite_source_ends_with_a_short_batch():
    plan = Plan(tasks=10, batch=4, steps=50)
    outcome = simulate(plan)
    assert outcome.error is None and outcome.state == "finished"
    assert_laws(plan, outcome)
    assert [len(batch) for batch in outcome.learner.batches] == [4, 4, 2]


def test_an_empty_source_ends_at_once():
    outcome = simulate(Plan(tasks=0))
    assert outcome.error is None and outcome.controller.step == 0


def test_a_stop_finishes_the_step_and_writes_a_checkpoint():
    plan = Plan(steps=1000, stop_at_s=12.0)
    outcome = simulate(plan)
    assert outcome.error is None and outcome.state == "stopped"
    assert 0 < outcome.controller.step < 1000
    assert outcome.watcher.checkpoints == 1
    assert_laws(plan, outcome)


def test_lag_never_passes_its_limit_and_what_is_too_old_is_dropped_or_recycled():
    costs = ScriptedCosts(length=30, length_sigma=1.2)
    for on_stale in ("drop", "recycle"):
        plan = Plan(ahead=4, max_version_lag=1, on_stale=on_stale, steps=15, costs=costs, train_s=0.2)
        outcome = simulate(plan)
        assert outcome.error is None
        assert_laws(plan, outcome)
        assert outcome.watcher.drops["stale" if on_stale == "drop" else "recycled"] > 0


def test_depth_bounds_lag_when_lengths_are_equal():
    costs = ScriptedCosts(length=10, length_sigma=0.0)
    outcome = simulate(Plan(ahead=2, steps=20, costs=costs, train_s=3.0))
    assert max(max(report.lags) for report in outcome.watcher.reports) <= 3


def test_a_group_below_min_complete_is_dropped_whole_and_one_above_it_keeps_its_true_size():
    costs = ScriptedCosts(length=60, length_sigma=1.5, token_s=0.1)
    plan = Plan(group_size=4, min_complete=2, group_timeout_s=4.0, steps=5, costs=costs)
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    sizes = {group.size for batch in outcome.learner.batches for group in batch}
    assert len(sizes) > 1


def test_scores_that_fail_leave_the_baseline_and_a_group_without_any_is_dropped():
    plan = Plan(score_fails=0.6, steps=5)
    outcome = simulate(plan)
    assert outcome.error is None
    assert_laws(plan, outcome)
    assert outcome.watcher.drops["unscored"] > 0


def test_weights_every_second_step():
    plan = Plan(every_steps=2, ahead=1, steps=8)
    outcome = simulate(plan)
    assert outcome.error is None
    assert outcome.learner.published == [0, 2, 4, 6, 8]
    assert_laws(plan, outcome)


def test_requests_of_closed_groups_are_aborted():
    costs = ScriptedCosts(length=60, length_sigma=1.5, token_s=0.1)
    outcome = simulate(Plan(group_size=4, min_complete=2, group_timeout_s=4.0, steps=5, costs=costs))
    assert outcome.controller.dispatcher.outstanding() == 0
