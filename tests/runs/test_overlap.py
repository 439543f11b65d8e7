"""What the timeline of a real run shows: who overlaps with whom, and which part the report names as the bottleneck."""

from __future__ import annotations

import pytest

from headrace.observability.bottleneck import find_bottleneck
from headrace.observability.timeline import flow_window, overlap_share

APART = ("runtime=processes", "weights.channel=shared_memory")


@pytest.mark.slow
def test_engine_and_trainer_overlap_when_separate(lab):
    ran = lab.here(
        "placement=separate",
        *APART,
        "training.groups=48",
        "group.size=8",
        "training.steps=10",
        "training.minibatches=2",
    )
    assert ran.code == 0, ran.err
    events = ran.events
    assert overlap_share(events, "engine", "trainer", flow_window(events)) >= 0.5


def test_engine_and_trainer_never_overlap_in_sync(lab):
    ran = lab.here("placement=sync", *APART, "training.groups=16", "group.size=8", "training.steps=5")
    assert ran.code == 0, ran.err
    events = ran.events
    assert overlap_share(events, "engine", "trainer", flow_window(events)) == 0.0
    assert {event.source for event in events} >= {"engine-0", "trainer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, delay",
    [
        ("reward", ('reward.functions=[{use="rewards.py:slow"}]', "group.size=8")),
        ("trainer", ("training.epochs=60",)),
        ("engine", ("rollout.engine.kind=hf", "rollout.sampling.max_tokens=40", "group.size=8")),
    ],
)
def test_a_delay_changes_the_part_that_the_report_names(lab, part, delay):
    """Each delay is put into the real part, in its own process."""
    ran = lab.here("placement=separate", *APART, "training.steps=6", *delay)
    assert ran.code == 0, ran.err
    verdict = find_bottleneck(ran.events)
    assert verdict.part == part, verdict.sentence
    assert verdict.change, "a sentence that names no key helps nobody"
