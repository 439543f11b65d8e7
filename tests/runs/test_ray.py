"""Runs whose parts are Ray actors, and the loss of one of them in the middle of it."""

from __future__ import annotations

import _thread
import asyncio
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import ConfigError, PartFailed
from headrace.exchange.channels import open_channel
from headrace.exchange.channels.changed import ChangedValues
from headrace.observability.jsonl import read_jsonl
from headrace.protocols import Resources
from runs.launch import RUN_S, assert_accounted, assert_one_line

pytestmark = pytest.mark.slow


class Killer(threading.Thread):
    """Kills engine-0 of a run once so many steps are made; with `trainer` also that, some steps after engine-0 is back."""

    def __init__(self, ray, folder: Path, after: int, trainer: bool = False) -> None:
        super().__init__(daemon=True)
        self.ray, self.folder, self.after, self.trainer = ray, folder, after, trainer
        self.killed: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            self.kill_all()
        except BaseException:
            _thread.interrupt_main()  # nothing else would end a run that is to be killed
            raise

    def kill_all(self) -> None:
        self.wait(lambda: self.steps() >= self.after)
        self.kill("engine-0")
        if self.trainer:
            messages = self.folder / "messages.txt"
            self.wait(lambda: messages.exists() and "engine-0 is replaced" in messages.read_text())
            steps = self.steps()
            self.wait(lambda: self.steps() >= steps + 30)
            self.kill("trainer")

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(read_jsonl(path)) if path.exists() else 0

    def wait(self, what) -> None:
        deadline = time.monotonic() + RUN_S
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self, part: str) -> None:
        (name,) = [name for name in self.ray.util.list_named_actors() if name.startswith(part)]
        self.killed.append(part)
        self.ray.kill(self.ray.get_actor(name))


@pytest.mark.timeout(900)
def test_an_actor_that_is_killed_is_replaced_and_the_run_goes_on(lab):
    killer = Killer(pytest.importorskip("ray"), lab.folder / "runs" / "r", 2)
    ran = lab.here("runtime=ray", "placement=separate", "training.steps=40")
    killer.join(5)
    assert killer.killed and ran.code == 0, ran.err
    assert_accounted(ran)
    assert ran.counts["trained"] == 40 * 4 and len(ran.steps) == 40
    assert "engine-0 is given up" in ran.messages and "engine-0 is replaced and runs version" in ran.messages
    joined = [event for event in ran.events if event.kind == "joined"]
    assert len(joined) == 1 and joined[0].version >= 1, "it came with the newest weights"
    assert {event.source for event in ran.events} >= {"controller", "engine-0", "trainer"}
    assert not killer.ray.is_initialized(), "the cluster ends with the run"


@pytest.mark.timeout(900)
def test_impala_over_ray_replaces_a_killed_actor_and_ends_with_a_killed_learner(lab):
    killer = Killer(pytest.importorskip("ray"), lab.folder / "runs" / "i", 20, trainer=True)
    words = ["env.target_return=none", "env.count=8", "env.steps=16", "training.steps=1000000", "runtime=ray"]
    ran = lab.cli(["run", "impala", *words, "--name", "i", "--display", "lines"])
    killer.join(5)
    assert killer.killed == ["engine-0", "trainer"] and ran.code == 1, ran.err
    assert_one_line(ran, "the trainer is gone")
    assert_accounted(ran)
    assert "engine-0 is replaced and runs version" in ran.messages and len(ran.steps) >= 50
    assert 1 <= max(row["lag/step/max"] for row in ran.steps) <= 8
    assert not killer.ray.is_initialized()


def test_memory_of_one_machine_is_refused_to_parts_on_several():
    pytest.importorskip("ray")
    from headrace.orchestrator.runtimes.ray import RayRuntime

    runtime = RayRuntime(lambda event: None)
    near, far = (ChangedValues(open_channel(kind)) for kind in ("shared_memory", "http"))
    for channel in (near, far, open_channel("ipc")):
        runtime._refuse_several_machines("trainer", "a", (1, channel))
        runtime._refuse_several_machines("engine-0", "a", (channel,))
    runtime._refuse_several_machines("engine-1", "b", (far, None))
    with pytest.raises(
        ConfigError, match=r"weights\.channel: .* Ray has placed trainer and engine-1 on different ones"
    ):
        runtime._refuse_several_machines("engine-1", "b", (near,))


class Anywhere:
    def __init__(self, context, channel) -> None:
        self.channel = channel

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


@pytest.mark.timeout(900)
def test_on_a_cluster_parts_go_where_their_cores_are(monkeypatch):
    """Two machines of one core each, as Ray sees them."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from headrace.orchestrator.runtimes.ray import RayRuntime

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    one = Resources(threads=1)

    async def place() -> None:
        runtime = RayRuntime(lambda event: None, spawn_timeout_s=60)
        near, far = open_channel("shared_memory"), open_channel("http")
        parts = [await runtime.spawn(name, Anywhere, far, resources=one) for name in ("trainer", "engine-0")]
        assert len({await part.node() for part in parts}) == 2
        for part in parts:
            await part.close()
        await runtime.spawn("trainer", Anywhere, near, resources=one)
        with pytest.raises(ConfigError, match=r"weights\.channel: .* placed trainer and engine-0 on different"):
            await runtime.spawn("engine-0", Anywhere, near, resources=one)
        runtime._spawn_timeout_s = 5.0
        with pytest.raises(PartFailed, match="it asks for 4 CPUs and 0 GPUs, the cluster has 1 and 0 free"):
            await runtime.spawn("engine-1", Anywhere, far, resources=Resources(threads=4))
        await runtime.close()

    try:
        asyncio.run(place())
    finally:
        cluster.shutdown()
