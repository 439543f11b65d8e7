"""The shared-memory channel between real processes: no torn reads, late, dead and stopped readers, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import pytest_asyncio
import torch

from headrace.errors import StaleTicket
from headrace.exchange.channels import open_channel
from headrace.exchange.channels import shared_memory as medium
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.protocols import WeightChannel, WorkerContext
from headrace.types import WeightTicket

LAYERS = 20


def weights(version: int, size: int = 20_000) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{i}", torch.full((size,), float(version))) for i in range(LAYERS)]


class Party:
    """One end of a channel in a process of its own: publishes as a trainer does, or reads as an engine does (takes the
    new version, looks at it, then lets the old one go)."""

    def __init__(self, context: WorkerContext) -> None:
        torch.set_num_threads(1)

    def join(self, channel: WeightChannel) -> None:
        self.channel = channel
        self.live: tuple[WeightTicket, dict[str, torch.Tensor]] | None = None

    def publish(self, version: int) -> WeightTicket:
        return self.channel.publish(weights(version), version)

    def reclaimed(self) -> int:
        return self.channel.reclaimed

    def swap(self, ticket: WeightTicket) -> str:
        """ "ok", "stale", or the versions that were seen in one set of layers."""
        try:
            views = dict(self.channel.read(ticket))
        except StaleTicket:
            return "stale"
        verdict = self.look(ticket, views)
        if self.live is not None:
            held, old = self.live
            if verdict == "ok":
                verdict = self.look(held, old)  # the version that runs must be whole until it is let go
            self.channel.release(held)
        self.live = (ticket, views)
        return verdict

    def look(self, ticket: WeightTicket, views: dict[str, torch.Tensor]) -> str:
        seen = {float(x) for tensor in views.values() for x in (tensor.min(), tensor.max())}
        return "ok" if seen == {float(ticket.version)} and len(views) == LAYERS else f"torn: {sorted(seen)}"

    def look_at_live(self) -> str:
        return self.look(*self.live)

    def latest_version(self) -> int:
        return self.channel.latest().version


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parties():
    """Three processes for the whole file (importing torch is what takes time); each is killed by one test at most."""
    runtime = ProcessRuntime(lambda event: None)
    yield await asyncio.gather(*[runtime.spawn(name, Party) for name in ("trainer", "engine-0", "engine-1")])
    await runtime.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reader_stopped_in_the_middle_of_reading_sees_whole_versions_or_a_refusal(parties):
    _, engine, _ = parties
    channel = open_channel("shared_memory", lease_timeout_s=0.01)
    await engine.join(channel)
    verdicts: list[str] = []
    version = 1
    ticket = channel.publish(weights(version), version)
    for round_number in range(30):
        swapping = asyncio.create_task(engine.swap(ticket))
        await asyncio.sleep(0.0004 * (round_number % 10))
        os.kill(engine.pid, signal.SIGSTOP)
        for _ in range(3):
            version += 1
            ticket = channel.publish(weights(version), version)
        os.kill(engine.pid, signal.SIGCONT)
        verdicts.append(await swapping)
    assert not [verdict for verdict in verdicts if verdict not in ("ok", "stale")], verdicts
    channel.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stopped_reader_costs_the_publisher_one_timeout_and_keeps_what_it_held(parties):
    _, stopped, _ = parties
    channel = open_channel("shared_memory", lease_timeout_s=0.6)
    await stopped.join(channel)
    first = channel.publish(weights(1), 1)
    assert await stopped.swap(first) == "ok"
    os.kill(stopped.pid, signal.SIGSTOP)
    took = []
    for version in range(2, 10):
        started = time.monotonic()
        ticket = channel.publish(weights(version), version)
        took.append(time.monotonic() - started)
    os.kill(stopped.pid, signal.SIGCONT)
    assert channel.reclaimed == 1 and took[1] >= 0.6 and sorted(took)[-2] < 0.6, took
    assert await stopped.look_at_live() == "ok", "what it held is whole, eight versions later"
    assert await stopped.swap(first) == "stale"
    assert await stopped.swap(ticket) == "ok"
    channel.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_object_made_in_the_controller_joins_a_trainer_and_engines_that_come_early_and_late(parties):
    trainer, engine, late = parties
    channel = open_channel("shared_memory", lease_timeout_s=20.0)
    before = set(os.listdir("/dev/shm"))
    await asyncio.gather(trainer.join(channel), engine.join(channel))
    verdicts: list[str] = []
    tickets = [await trainer.publish(1)]
    done = False

    async def swap_for_ever() -> None:
        while not done:
            verdicts.append(await engine.swap(tickets[-1]))

    swapping = asyncio.create_task(swap_for_ever())
    for version in range(2, 80):  # the trainer fills one segment while the engine reads and swaps from the other
        tickets.append(await trainer.publish(version))
    done = True
    await swapping
    torn = [verdict for verdict in verdicts if verdict not in ("ok", "stale")]
    assert not torn and verdicts.count("ok") > 20, (torn[:3], len(verdicts))
    assert await trainer.reclaimed() == 0

    await late.join(channel)
    assert await late.swap(tickets[-1]) == "ok" and await late.latest_version() == 79
    assert await late.swap(tickets[0]) == "stale"
    assert set(os.listdir("/dev/shm")) <= before

    # a publisher that is killed takes nothing from those who have read, and refuses those who have not
    os.kill(trainer.pid, signal.SIGKILL)
    await trainer.kill()
    assert await late.look_at_live() == "ok" and await late.swap(tickets[-1]) == "ok"
    with pytest.raises(StaleTicket, match="publisher"):
        channel.read(tickets[-1])


@pytest.mark.asyncio(loop_scope="module")
async def test_nobody_waits_for_a_dead_reader(parties):
    _, _, dead = parties
    channel = open_channel("shared_memory", lease_timeout_s=20.0)
    await dead.join(channel)
    assert await dead.swap(channel.publish(weights(1), 1)) == "ok"
    os.kill(dead.pid, signal.SIGKILL)
    await dead.kill()
    started = time.monotonic()
    for version in (2, 3):  # the third fills the segment that the dead one held
        channel.publish(weights(version), version)
    assert time.monotonic() - started < 10, "the kernel ends a dead reader's lease"
    assert channel.reclaimed == 0
    channel.close()


def test_mappings_of_segments_that_are_not_used_any_more_are_given_back():
    channel = open_channel("shared_memory", lease_timeout_s=0.0)
    open_before = len(os.listdir("/proc/self/fd"))
    for version in range(30):
        ticket = channel.publish(weights(version, size=1000 * (version + 1)), version)  # ever new segments
        channel.read(ticket)
        channel.release(ticket)
    assert len(channel._attached) <= 2
    assert len(os.listdir("/proc/self/fd")) - open_before <= 9, "two segments at both ends, and the claim"
    held = channel.read(ticket)
    channel.close()
    assert float(held["layer.3"].sum()) == 29 * 30_000, "views outlive the channel"
    del held
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_machine_without_anonymous_files_uses_named_ones_and_unlinks_them(monkeypatch, tmp_path):
    monkeypatch.delattr(medium.os, "memfd_create")
    monkeypatch.setattr(medium.tempfile, "tempdir", str(tmp_path))
    channel = open_channel("shared_memory", lease_timeout_s=0.0)
    for version in range(1, 5):
        ticket = channel.publish(weights(version, 100), version)
        assert float(channel.read(ticket)["layer.0"][0]) == version
        channel.release(ticket)
    assert len(os.listdir(tmp_path)) == 2
    channel.close()
    assert os.listdir(tmp_path) == []
    with pytest.raises(StaleTicket):
        channel.read(ticket)
