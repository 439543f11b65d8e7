"""A run whose parts are Ray actors, and the loss of one of them in the middle of it."""

from __future__ import annotations

import threading
import time

import pytest

from headrace.observability.jsonl import read_jsonl
from runs.launch import assert_accounted

pytestmark = pytest.mark.slow


def test_an_actor_that_is_killed_is_replaced_and_the_run_goes_on(lab):
    ray = pytest.importorskip("ray")
    killed: list[str] = []
    metrics = lab.folder / "runs" / "r" / "metrics.jsonl"

    def kill() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and len(read_jsonl(metrics)) >= 2):
            time.sleep(0.05)
        names = [name for name in ray.util.list_named_actors() if name.startswith("engine-0")]
        killed.extend(names)
        ray.kill(ray.get_actor(names[0]))

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    ran = lab.here("runtime=ray", "placement=separate", "training.steps=40")
    killer.join(5)
    assert killed and ran.code == 0, ran.err
    assert_accounted(ran)
    assert ran.counts["trained"] == 40 * 4 and len(ran.steps) == 40
    assert "engine-0 is given up" in ran.messages and "engine-0 is replaced and runs version" in ran.messages
    joined = [event for event in ran.events if event.kind == "joined"]
    assert len(joined) == 1 and joined[0].version >= 1, "it came with the newest weights"
    assert {event.source for event in ran.events} >= {"controller", "engine-0", "trainer"}
    assert not ray.is_initialized(), "the cluster ends with the run"
