"""Admission and ageing of the lease buffer."""

from __future__ import annotations

import asyncio

import pytest

from exchange.units import buffer, group
from headrace.errors import BufferClosed
from headrace.exchange.ledger import TRAINED
from headrace.exchange.stores.memory import MemoryStore


async def admit_all(made) -> list:
    leases = []
    while made.room():
        leases.append(await made.admit())
    return leases


async def test_no_more_is_admitted_than_the_trainer_will_take():
    made = buffer(batch=2, ahead=3)
    made.wanted = 3
    leases = await admit_all(made)
    assert len(leases) == 3, "room for 8, but only 3 units are ever taken"
    made.settle(leases[0], "timeout")
    assert len(await admit_all(made)) == 1, "one that is lost is wanted again"
    made.wanted = 0
    assert made.room() == 0


async def test_what_is_oversampled_is_wanted_too():
    made = buffer(batch=2, ahead=0, oversample=1)
    made.wanted = 2
    assert len(await admit_all(made)) == 3


async def test_trained_leases_hold_room_and_are_not_wanted_again():
    made = buffer(batch=2, ahead=1)
    made.wanted = 4
    for lease in await admit_all(made):
        made.put(lease, group(str(lease.index)))
    taken = [lease for lease, _ in await made.take(2, 0)]
    made.mark_trained(taken)
    made.wanted = 2
    assert made.room() == 0
    for lease in taken:
        made.settle(lease, TRAINED)
    assert made.room() == 0, "the two that are ready are the last ones wanted"


@pytest.mark.parametrize("on_stale, outcome", [("drop", "stale"), ("recycle", "recycled")])
async def test_age_is_judged_at_take_so_that_time_in_the_queue_counts(on_stale, outcome):
    made = buffer(batch=1, ahead=3, max_version_lag=2, on_stale=on_stale)
    old, new = await made.admit(), await made.admit()
    made.put(old, group("old", version=0))
    made.put(new, group("new", version=1))
    made.versions.version = 3
    [(lease, _)] = await made.take(1, 3)
    assert lease is new and old.outcome == outcome
    assert [task for task, remainder in made.pool] == ([old.task] if on_stale == "recycle" else [])


async def test_a_store_that_is_full_holds_admission_back_and_never_a_batch():
    unit = group("x")
    probe = MemoryStore(0)
    probe.append("x", unit)
    made = buffer(batch=2, ahead=3, store=MemoryStore(probe.bytes()))
    leases = []
    for _ in range(2):
        leases.append(await made.admit())
        made.put(leases[-1], unit)
    waiting = asyncio.ensure_future(made.admit())
    await asyncio.sleep(0.01)
    assert not waiting.done() and made.room() > 0, "the store is full though there is room"
    assert [lease.index for lease, _ in await made.take(2, 0)] == [0, 1], "a batch comes together all the same"
    made.mark_trained(leases)
    for lease in leases:
        made.settle(lease, TRAINED)
    assert (await waiting).index == 2, "the task that was picked keeps its place"


async def test_restored_leases_come_first_with_their_index_and_then_the_pool():
    made = buffer(batch=4, tasks=1)
    task = made.source.next()
    made.next_index = 9
    made.restored.append((4, task, None))
    made.pool.append((task, "rest"))
    first, second = await made.admit(), await made.admit()
    assert (first.index, second.index, second.remainder) == (4, 9, "rest")
    for lease in (first, second):
        made.settle(lease, "timeout")
    with pytest.raises(BufferClosed):
        await made.admit()
