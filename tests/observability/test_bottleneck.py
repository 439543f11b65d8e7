"""Delays put into engine, reward, trainer, weight sync and admission in turn change the part that is named."""

import pytest
from synthetic import Delays, flow_events

from headrace.observability.bottleneck import SPREAD, Setting, alternating_share, find_bottleneck, measure
from headrace.types import Event

S = 1_000_000_000

CASES = {
    "engine": (Delays(generate_s=2.0, train_s=0.6), "rollout.engine.threads"),
    "trainer": (Delays(generate_s=0.5, train_s=2.0), "training.threads"),
    "reward": (Delays(generate_s=0.4, score_s=3.0, train_s=0.4), "reward.workers"),
    "weight sync": (Delays(generate_s=0.3, train_s=0.4, publish_s=2.0), "weights.every_steps"),
}


@pytest.mark.parametrize("part", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_delay_in_a_part_names_it_and_its_key(part, seed):
    delays, key = CASES[part]
    verdict = find_bottleneck(flow_events(delays, seed=seed), {"placement": "separate"})
    assert verdict.part == part
    assert key in verdict.change and key in verdict.sentence
    assert "%" in verdict.sentence and verdict.sentence.endswith(".") and "\n" not in verdict.sentence


def test_alternating_parts_name_the_largest_share():
    config = {"placement": "sync"}
    slow_engine = find_bottleneck(flow_events(Delays(generate_s=2.0, train_s=1.0, ahead=0)), config)
    slow_trainer = find_bottleneck(flow_events(Delays(generate_s=1.0, train_s=2.0, ahead=0)), config)
    slow_reward = find_bottleneck(flow_events(Delays(generate_s=0.5, score_s=3.0, train_s=1.0, ahead=0)), config)
    assert (slow_engine.part, slow_trainer.part, slow_reward.part) == ("engine", "trainer", "reward")
    assert 'placement = "separate"' in slow_engine.sentence


def stop_and_go(gate: bool = False) -> list[Event]:
    """Every second: 0.2 s of generation, 0.5 s in which nobody works, 0.3 s of training under the next generation."""
    events = []
    for second in range(20):
        at = second * S
        events += [
            Event(at, "controller", "admitted", str(second)),
            Event(at, "engine-0", "generate", duration_ns=S // 5),
            Event(at + S // 5, "controller", "gate" if gate else "wait_room", duration_ns=7 * S // 10),
            Event(at, "controller", "wait_batch", duration_ns=7 * S // 10),
            Event(at + 7 * S // 10, "trainer", "forward_backward", duration_ns=3 * S // 10),
            Event(at + 8 * S // 10, "engine-0", "generate", duration_ns=2 * S // 10),
            Event(at + S, "controller", "trained", str(second)),
        ]
    return events


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"rollout": {"max_in_flight": 4}}, "rollout.max_in_flight"),
        ({"staleness": {"max_steps_ahead": 0}}, "staleness.max_steps_ahead"),
        ({"buffer": {"depth": "queue", "steps": 1}}, "buffer.steps"),
        ({}, "buffer.depth"),
    ],
)
def test_idle_engines_under_a_waiting_trainer_blame_admission_and_name_the_key_that_was_set(config, key):
    verdict = find_bottleneck(stop_and_go(), config)
    assert verdict.part == "admission"
    assert key in verdict.sentence and verdict.change[0] == key


def test_the_same_pause_behind_a_closed_gate_is_the_weight_sync():
    assert find_bottleneck(stop_and_go(gate=True)).part == "weight sync"


def test_both_busy_all_the_time_says_that_alternating_may_be_quicker():
    verdict = find_bottleneck(flow_events(Delays(generate_s=1.0, train_s=1.0, score_s=0.01, publish_s=0.0), steps=40))
    assert any('placement = "sync"' in note for note in verdict.notes)
    idle_engine = find_bottleneck(flow_events(Delays(generate_s=0.3, train_s=1.0), steps=40))
    assert not any('placement = "sync"' in note for note in idle_engine.notes)


def test_cores_that_stand_idle_side_by_side_say_what_alternating_would_save():
    """Engine 0.5 s and trainer 1 s of one core each: 1.5 s of work in 2 s of two cores' time."""
    config = {"placement": "separate", "rollout": {"engine": {"threads": 1}}, "training": {"threads": 1}}
    uneven = flow_events(Delays(generate_s=0.5, train_s=1.0, score_s=0.01, publish_s=0.0), steps=40)
    (note,) = find_bottleneck(uneven, config, cores=2).notes
    shown = [int(word.rstrip("%")) for word in note.split() if word.endswith("%")]
    assert shown == [pytest.approx(25, abs=3), pytest.approx(75 / SPREAD, abs=3)]
    assert 'placement = "sync"' in note and "rollout.engine.threads = 2" in note
    even = flow_events(Delays(generate_s=1.0, train_s=1.0, score_s=0.01, publish_s=0.0), steps=40)
    assert alternating_share(measure(even), Setting(config), 2) > 1, "nothing to save where both work all the time"
    # Where cores are left over, giving them out comes first; a machine that is not known says nothing.
    assert alternating_share(measure(uneven), Setting(config), 4) is None
    assert not find_bottleneck(uneven, config).notes


def test_many_drops_are_noted():
    events = flow_events(Delays())
    assert any("40% of the units were dropped" in note for note in find_bottleneck(events, dropped_share=0.4).notes)
    assert not any("dropped" in note for note in find_bottleneck(events, dropped_share=0.01).notes)


@pytest.mark.parametrize(
    "events",
    [[], [Event(5, "controller", "admitted")], [Event(5, "engine-0", "generate", duration_ns=0)]],
    ids=["none", "one point", "no duration"],
)
def test_a_run_that_trained_nothing_has_no_bottleneck(events):
    verdict = find_bottleneck(events)
    assert verdict.part == "unknown" and verdict.sentence


@pytest.mark.parametrize("delays", [*(case[0] for case in CASES.values()), Delays(ahead=0), Delays(ahead=3)])
def test_the_trainers_time_is_attributed_once(delays):
    shares = measure(flow_events(delays))
    assert 0.9 < sum(shares.held.values()) <= 1.0 + 1e-9
    assert all(-1e-9 <= share <= 1 for share in shares.held.values())


def test_of_two_that_work_side_by_side_the_one_that_never_rests_is_named():
    quick_scoring = flow_events(Delays(generate_s=2.0, score_s=1.8, train_s=0.5), steps=30)
    slow_scoring = flow_events(Delays(generate_s=1.8, score_s=2.4, train_s=0.5), steps=30)
    assert find_bottleneck(quick_scoring).part == "engine"
    assert find_bottleneck(slow_scoring).part == "reward"


@pytest.mark.parametrize("delays", [Delays(generate_s=2.0, train_s=0.5), Delays(generate_s=0.3, train_s=2.0)])
def test_advice_for_control_names_keys_that_control_reads(delays):
    verdict = find_bottleneck(flow_events(delays), {"placement": "separate", "env": {"id": "CartPole-v1"}})
    words = f"{verdict.sentence} {' '.join(verdict.change)}"
    assert verdict.part in ("engine", "trainer")
    assert not any(key in words for key in ("max_tokens", "micro_tokens", "generation", "Generation"))
    assert verdict.change[-1] in ("env.count", "training.epochs")
