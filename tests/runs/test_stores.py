"""Whole runs through each store; a killed one goes on with what its durable store holds."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from headrace.exchange.stores import AVAILABLE
from runs.launch import assert_accounted


def words(kind: str, request: pytest.FixtureRequest) -> list[str]:
    made = [f"buffer.store={kind}"]
    if kind == "redis":
        made.append(f"buffer.url={request.getfixturevalue('redis_server').url}")
    return made


SLOW = pytest.mark.slow


def test_the_store_changes_nothing_of_what_is_learned(lab, request):
    memory, *others = (
        lab.here("training.steps=3", "checkpoint.every_steps=1", *words(kind, request), "--name", kind)
        for kind in AVAILABLE
    )
    assert memory.weights != ""
    for ran in others:
        assert ran.code == 0, ran.err
        assert ran.weights == memory.weights and ran.counts == memory.counts
        assert_accounted(ran)
    assert len(list((lab.folder / "runs/files/store").glob("*.log"))) == 1, "all that was trained is forgotten"


@pytest.mark.parametrize("kind", ["files", pytest.param("redis", marks=SLOW)])
def test_a_killed_run_goes_on_with_the_units_that_were_stored_after_its_checkpoint(lab, kind, request):
    """Under sync, with tasks drawn again in the same order, the same weights come out as without the kill."""
    base = ("checkpoint.every_steps=4", *words(kind, request))
    whole = lab.here("training.steps=12", *base, "--name", "whole")
    assert whole.code == 0, whole.err
    lab.hold("killed", 7)
    running = lab.start("training.steps=12", *base, "--name", "killed")
    running.until_step(7)
    running.kill()
    lab.let_go()
    resumed = lab.here(resume="killed")
    assert resumed.code == 0, resumed.err
    assert_accounted(resumed)
    assert resumed.counts["trained"] == 12 * 4
    again = [event for event in resumed.events if event.kind == "admitted" and event.subject_id.startswith("1-")]
    assert len(again) <= (12 - 4 - 3) * 4, "the units of three steps after the checkpoint are not sampled again"
    assert resumed.weights == whole.weights


@pytest.mark.parametrize("kind", ["redis", pytest.param("files", marks=SLOW)])
def test_an_asynchronous_run_that_is_killed_accounts_for_every_unit(lab, kind, request):
    base = ("placement=separate", "runtime=local", "checkpoint.every_steps=3", "rollout.oversample=3")
    lab.hold("killed", 8)
    running = lab.start(*base, "training.steps=14", *words(kind, request), "--name", "killed")
    running.until_step(8)
    running.kill()
    lab.let_go()
    resumed = lab.here(resume="killed")
    assert resumed.code == 0, resumed.err
    assert_accounted(resumed)
    assert resumed.counts["trained"] == 14 * 4


def test_a_server_that_restarts_in_the_middle_of_a_run_is_waited_for(lab, own_redis):
    running = lab.start(
        "buffer.store=redis", f"buffer.url={own_redis.url}", "placement=separate", "runtime=local", "training.steps=30"
    )
    running.until_step(4)
    own_redis.stop(signal.SIGKILL)
    threading.Timer(1.0, own_redis.start).start()
    ran = running.wait()
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert ran.counts["trained"] == 30 * 4 and not ran.counts["dropped"].get("lost")
    assert Path(ran.folder / "run.json").exists()
