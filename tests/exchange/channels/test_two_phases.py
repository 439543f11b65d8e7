"""Syncs of three receivers in processes of their own, one of which fails or stands still in either phase: the others get
the version within the deadlines, the one is fenced and comes back whole; over every channel between processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time

import pytest
import pytest_asyncio
import torch

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels import AVAILABLE, collective, open_channel
from headrace.exchange.channels.changed import ChangedValues
from headrace.exchange.interruption import INTERRUPTIONS
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.orchestrator.weight_sync import WeightSync
from headrace.protocols import WeightChannel, WorkerContext
from headrace.types import NO_VERSION, WeightTicket

BETWEEN_PROCESSES = [kind for kind in AVAILABLE if kind != "in_process"]
DEADLINE_S = 2.5
"""Of a phase. Healthy receivers take milliseconds, on a busy machine some hundred."""
SLOW = pytest.mark.slow


def weights(version: int, changed: int = -1) -> list[tuple[str, torch.Tensor]]:
    """All values are the version, or only the first few are and the others 0."""
    layers = [(f"layer.{i}", torch.full((50_000 + i,), float(version))) for i in range(4)]
    for _, tensor in layers:
        tensor[changed if changed >= 0 else tensor.numel() :] = 0.0
    return layers


class Trainer:
    def __init__(self, context: WorkerContext) -> None:
        torch.set_num_threads(1)

    def join(self, channel: WeightChannel) -> None:
        self.channel = channel
        self.changed = 10 if isinstance(channel, ChangedValues) else -1

    def publish(self, version: int) -> WeightTicket:
        return self.channel.publish(weights(version, self.changed), version)

    def whole(self) -> WeightTicket:
        return self.channel.whole()

    def group_sizes(self) -> list[int]:
        return [len(members) for members, _ in self.channel._publisher._groups.values()]

    def leave(self) -> None:
        self.channel.close()


class Receiver:
    """Stages and swaps as an engine does. `fault` is (phase, what): raise, or stop (the whole process, by a signal)."""

    def __init__(self, context: WorkerContext) -> None:
        torch.set_num_threads(1)

    def join(self, channel: WeightChannel) -> None:
        self.channel = channel
        self.live: tuple[int, list[float]] = (NO_VERSION, [])
        self.staged: tuple[int, list[float]] | None = None
        self.fault: tuple[str, str] | None = None

    def arm(self, phase: str, what: str) -> None:
        self.fault = (phase, what)

    def stop_in_the_middle_of_a_transfer(self) -> None:
        def stopping(*args, **kwargs):
            collective.move = whole
            os.kill(os.getpid(), signal.SIGSTOP)
            return whole(*args, **kwargs)

        whole, collective.move = collective.move, stopping

    def leave(self) -> None:
        self.channel.close()

    def _fail_at(self, phase: str) -> None:
        if self.fault is not None and self.fault[0] == phase:
            what, self.fault = self.fault[1], None
            if what == "raise":
                raise RuntimeError(f"broken in {phase}")
            os.kill(os.getpid(), signal.SIGSTOP)

    async def prepare(self, ticket: WeightTicket) -> None:
        newest = max(self.live[0], self.staged[0] if self.staged else NO_VERSION)
        if ticket.version < newest:
            raise StaleTicket(f"version {ticket.version} is older than {newest}")
        if ticket.version == newest:
            return
        self._fail_at("prepare")
        tensors = await asyncio.to_thread(self.channel.read, ticket)
        seen = sorted({float(x) for tensor in tensors.values() for x in (tensor.min(), tensor.max())})
        del tensors
        self.channel.release(ticket)
        self.staged = (ticket.version, seen)

    async def commit(self, ticket: WeightTicket, running: str = "go_on") -> None:
        await self.prepare(ticket)
        self._fail_at("commit")
        if ticket.version != self.live[0]:
            self.live, self.staged = self.staged, None

    def look(self) -> tuple[int, list[float]]:
        return self.live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parties():
    """A trainer and three receivers for the whole file; nobody is killed, so nobody has to be started again."""
    runtime = ProcessRuntime(lambda event: None)
    names = [("trainer", Trainer), *((f"engine-{n}", Receiver) for n in range(3))]
    yield await asyncio.gather(*(runtime.spawn(name, factory) for name, factory in names))
    await runtime.close()


class Cluster:
    """The production dispatcher and sync over the four processes, on one channel."""

    def __init__(self, trainer, receivers, scope: str) -> None:
        self.trainer, self.receivers = trainer, receivers
        self.dispatcher = Dispatcher(generate_timeout_s=5.0, rejoin_timeout_s=5.0)
        self.fenced: list[str] = []
        self.dispatcher.on_fenced = lambda slot, reason: self.fenced.append(f"{slot.name}: {reason}")

        async def scored() -> None: ...

        self.sync = WeightSync(
            self.dispatcher,
            INTERRUPTIONS["never"],
            prepare_timeout_s=DEADLINE_S,
            commit_timeout_s=DEADLINE_S,
            drain_timeout_s=1.0,
            scoring=scored,
            whole=trainer.whole if scope == "changed" else None,
        )

    async def publish(self, version: int) -> tuple[WeightTicket, float]:
        """The ticket, and the seconds until it was live."""
        ticket = await self.trainer.publish(version)
        started = time.monotonic()
        await self.sync.sync(ticket)
        return ticket, time.monotonic() - started

    async def versions(self, *which: int) -> list[int]:
        seen = [await self.receivers[n].look() for n in which]
        assert all(values in ([float(version)], [0.0, float(version)]) for version, values in seen), seen
        return [version for version, _ in seen]


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(parties, tmp_path):
    trainer, *receivers = parties
    made: list[Cluster] = []

    async def open_one(kind: str, scope: str = "full") -> Cluster:
        channel = open_channel(
            kind,
            folder=str(tmp_path / "weights"),
            timeout_s=0.6,
            lease_timeout_s=0.2,
            bucket_mb=0.05,
            scope=scope,
            full_every=100,
        )
        await asyncio.gather(*(part.join(channel) for part in parties))
        cluster = Cluster(trainer, receivers, scope)
        made.append(cluster)
        for slot in [EngineSlot(f"engine-{n}", receiver) for n, receiver in enumerate(receivers)]:
            cluster.dispatcher.join(slot)
        return cluster

    yield open_one
    for receiver in receivers:
        os.kill(receiver.pid, signal.SIGCONT)
    await asyncio.gather(*(part.leave() for part in parties))


def cases():
    quick = {("collective", "prepare"), ("shared_memory", "prepare"), ("http", "commit")}
    for kind in BETWEEN_PROCESSES:
        for phase in ("prepare", "commit"):
            yield pytest.param(kind, phase, "raise", id=f"{kind}-{phase}-raise")
            marks = () if (kind, phase) in quick else SLOW
            yield pytest.param(kind, phase, "stop", id=f"{kind}-{phase}-stop", marks=marks)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("kind", "phase", "what"), cases())
async def test_one_of_three_that_fails_is_fenced_and_comes_back(cluster, kind, phase, what):
    made = await cluster(kind)
    _, plain_s = await made.publish(1)
    assert await made.versions(0, 1, 2) == [1, 1, 1]
    bad = made.receivers[1]
    await bad.arm(phase, what)
    second, took_s = await made.publish(2)
    assert took_s < DEADLINE_S + 1.5 and (what == "stop") == (took_s >= DEADLINE_S)
    assert [words.partition(": ")[2].startswith(phase) for words in made.fenced] == [True]
    assert [slot.name for slot in made.dispatcher.live()] == ["engine-0", "engine-2"]
    assert await made.versions(0, 2) == [2, 2]
    third, took_s = await made.publish(3)
    assert took_s < max(1.0, 5 * plain_s), "nobody waits for the fenced one any more"

    os.kill(bad.pid, signal.SIGCONT)
    await made.sync.join(EngineSlot("engine-1", bad))
    assert await made.versions(0, 1, 2) == [3, 3, 3]
    await asyncio.gather(bad.prepare(third), bad.prepare(third))
    await bad.commit(third)
    await bad.commit(third)  # each phase may be repeated
    with pytest.raises(StaleTicket):
        await bad.prepare(second)
    await made.publish(5)  # numbers may be skipped
    assert await made.versions(0, 1, 2) == [5, 5, 5] and len(made.fenced) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_member_that_stops_in_the_middle_of_a_broadcast_holds_up_no_one_else(cluster):
    made = await cluster("collective")
    await together(made, 3, 1)
    await made.receivers[1].stop_in_the_middle_of_a_transfer()
    await made.publish(20)
    assert len(made.fenced) == 1 and made.fenced[0].startswith("engine-1: prepare")
    assert await made.versions(0, 2) == [20, 20], "the two others asked again and got it alone"
    os.kill(made.receivers[1].pid, signal.SIGCONT)
    await made.publish(21)
    await made.sync.join(EngineSlot("engine-1", made.receivers[1]))
    await together(made, 3, 22)
    made.dispatcher.slots.pop("engine-0")
    made.dispatcher.slots.pop("engine-2")
    await together(made, 1, 40)


async def together(made: Cluster, members: int, version: int) -> None:
    """Publish until all receivers came to one transfer (on a busy machine they may miss each other)."""
    for number in range(version, version + 10):
        await made.publish(number)
        if await made.trainer.group_sizes() == [members]:
            return
    raise AssertionError(f"they never came together: {await made.trainer.group_sizes()}")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ["shared_memory", "collective", "filesystem"])
async def test_who_missed_a_version_of_what_changed_gets_the_next_whole(cluster, kind):
    made = await cluster(kind, scope="changed")
    first, _ = await made.publish(1)
    away = made.dispatcher.slots.pop("engine-1")
    ticket, _ = await made.publish(2)
    assert (first.scope, ticket.scope) == ("full", "changed") and ticket.bytes < first.bytes / 100
    assert await made.versions(0, 2) == [2, 2]
    made.dispatcher.join(away)  # nobody noticed that it had missed a version
    third, _ = await made.publish(3)
    assert third.scope == "changed"
    assert await made.versions(0, 1, 2) == [3, 3, 3] and not made.fenced

    made.dispatcher.slots.pop("engine-0")
    await made.publish(4)
    await made.sync.join(EngineSlot("engine-0", made.receivers[0]))
    await made.publish(5)
    assert await made.versions(0, 1, 2) == [5, 5, 5] and not made.fenced


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
async def test_a_second_trainer_is_refused_while_the_first_lives(parties, tmp_path, kind):
    trainer, receiver, *_ = parties
    channel = open_channel(kind, folder=str(tmp_path / "weights"), timeout_s=0.6)
    second = pickle.loads(pickle.dumps(channel))
    await trainer.join(channel)
    await receiver.join(pickle.loads(pickle.dumps(channel)))
    ticket = await trainer.publish(4)
    await receiver.commit(ticket)
    with pytest.raises(PartFailed, match="another process publishes"):
        second.publish(weights(9), 9)
    await trainer.leave()
    lower = 3
    if kind == "filesystem":
        with pytest.raises(StaleTicket):
            second.publish(weights(lower), lower)
    else:  # the medium does not remember; the receivers do
        with pytest.raises(StaleTicket):
            await receiver.prepare(second.publish(weights(lower), lower))
    await receiver.commit(second.publish(weights(9), 9))
    assert await receiver.look() == (9, [9.0])
    second.close()
    await receiver.leave()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ["filesystem", "http"])
async def test_actors_that_pull_see_every_new_version_by_asking(parties, tmp_path, kind):
    """They know an address (and a token) and nothing else."""
    trainer, *_ = parties
    if kind == "filesystem":
        channel = open_channel(kind, folder=str(tmp_path / "weights"))
        puller = open_channel(kind, folder=str(tmp_path / "weights"))
    else:
        from headrace.exchange.channels.http import HttpChannel
        from redis_server import free_port

        address = f"127.0.0.1:{free_port()}"
        channel, puller = HttpChannel(address, token="secret"), HttpChannel(address, token="secret")
        stranger = HttpChannel(address, token="guess")
    await trainer.join(channel)
    for version in (1, 2, 7):
        await trainer.publish(version)
        ticket = puller.latest()
        assert ticket.version == version and float(puller.read(ticket)["layer.3"][0]) == version
        puller.release(ticket)
        if kind == "http":
            with pytest.raises(PartFailed, match="401"):
                stranger.latest()
            with pytest.raises(PartFailed, match="401"):
                stranger.read(ticket)
    await trainer.leave()
    puller.close()
