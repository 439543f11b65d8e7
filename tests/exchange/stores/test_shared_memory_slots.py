"""Units in slots of shared memory: between processes their places travel, and slots are used again."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal

import pytest
import pytest_asyncio

from exchange.units import group
from headrace.errors import DataError, UnitLost
from headrace.exchange.stores.shared_memory import Arena, SharedMemoryStore, SlotRef, read_slot
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.protocols import WorkerContext


class Producer:
    """Makes units in its own arena and sends their places; reads units of others by their places."""

    def __init__(self, context: WorkerContext) -> None:
        self.arena = Arena()

    def make(self, name: str, tokens: int) -> SlotRef:
        return self.arena.write(group(name, tokens=tokens))

    def read(self, ref: SlotRef) -> str:
        return read_slot(ref).group_id

    def arena_bytes(self) -> int:
        return len(self.arena._map)


@pytest_asyncio.fixture
async def producers():
    runtime = ProcessRuntime(lambda event: None)
    yield await asyncio.gather(runtime.spawn("one", Producer), runtime.spawn("two", Producer))
    await runtime.close()


async def test_places_travel_between_processes_and_units_outlive_their_producer(producers):
    one, two = producers
    store = SharedMemoryStore()
    refs = await asyncio.gather(*(producers[n % 2].make(str(n), 1000 * n + 1) for n in range(20)))
    for number, ref in enumerate(refs):
        assert len(pickle.dumps(ref)) < 250, "the unit itself stays where it is"
        store.adopt(str(number), ref)
    assert await two.read(refs[0]) == "0", "a third process reads by the place alone"
    os.kill(one.pid, signal.SIGKILL)
    await one.kill()
    for number in range(20):
        unit = store.read(str(number))
        assert unit.group_id == str(number) and unit.episodes[0].samples[0].token_ids.size == 1000 * number + 1
    with pytest.raises(UnitLost, match="closed it or died"):
        read_slot(refs[0])

    grown = await two.arena_bytes()
    for round_number in range(30):  # its reader frees the slots, so its arena stays as it is
        store.acknowledge(f"again-{round_number - 1}" if round_number else "1")
        store.adopt(f"again-{round_number}", await two.make("again", 1001))
    assert await two.arena_bytes() == grown
    store.close()


def test_slots_are_used_again_and_an_old_place_is_refused():
    store = SharedMemoryStore()
    store.append("a", group("a"))
    old = store.ref("a")
    store.acknowledge("a")
    with pytest.raises(UnitLost):
        read_slot(old)
    store.append("b", group("b"))
    assert store.ref("b").offset == old.offset
    with pytest.raises(UnitLost, match="another unit"):
        read_slot(old)
    assert read_slot(store.ref("b")).group_id == "b"
    store.close()


def test_a_place_that_is_none_is_refused():
    arena = Arena()
    ref = arena.write(group("a"))
    for wrong in (
        SlotRef(arena="x", offset=0, serial=1, bytes=1),
        SlotRef(arena=ref.arena, offset=1 << 40, serial=1, bytes=1),
        SlotRef(arena=ref.arena, offset=-64, serial=1, bytes=64),
    ):
        with pytest.raises(DataError):
            read_slot(wrong)
    arena.write_bytes(b"not a group!")
    with pytest.raises(DataError, match="not a unit"):
        read_slot(SlotRef(arena=ref.arena, offset=4096, serial=2, bytes=12))
    arena.close()
    with pytest.raises(UnitLost):
        read_slot(ref)


def test_nothing_is_left_open_or_in_dev_shm():
    files, shared = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    store = SharedMemoryStore()
    for number in range(50):
        store.append(str(number), group(str(number), tokens=5000))
    store.close()
    assert len(os.listdir("/proc/self/fd")) == files and set(os.listdir("/dev/shm")) <= shared
