"""The Buffer contract, over every store: who waits, who never does, and that a lease ends once."""

from __future__ import annotations

import asyncio

import pytest

from exchange.units import buffer, unit_for
from headrace.errors import BufferClosed, ConservationError
from headrace.exchange.ledger import RECYCLED, TRAINED
from headrace.exchange.stores import AVAILABLE, open_store
from headrace.exchange.stores.replay import ReplayStore


@pytest.fixture(params=[*AVAILABLE, "replay"])
def store(request, tmp_path):
    if request.param == "replay":
        yield ReplayStore(1000)
        return
    server = request.getfixturevalue("redis_server").url if request.param == "redis" else ""
    made = open_store(request.param, 0, str(tmp_path / "store"), server)
    yield made
    made.close()


async def blocked(awaitable) -> asyncio.Task:
    """The task, after it had every chance to go on; it must still wait."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def trained(made, leases):
    made.mark_trained(leases)
    return [made.settle(lease, TRAINED) for lease in leases]


async def test_admit_waits_for_room_and_then_picks_the_task(store):
    made = buffer(batch=2, ahead=0, store=store)
    first, second = await made.admit(), await made.admit()
    waiting = await blocked(made.admit())
    assert made.source.given == 2, "no task is picked before there is room for it"
    made.settle(first, RECYCLED, "what was done")
    third = await waiting
    assert third.task is first.task and third.remainder == "what was done", "the recycled task is there by then"
    assert made.source.given == 2
    assert [lease.index for lease in (first, second, third)] == [0, 1, 2]


async def test_room_comes_back_when_the_weights_are_live_and_not_before(store):
    made = buffer(batch=1, ahead=0, store=store)
    lease = await made.admit()
    made.put(lease, unit_for(store, "a"))
    waiting = await blocked(made.admit())
    [(taken, _)] = await made.take(1, 0)
    made.mark_trained([taken])
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert made.settle(taken, TRAINED)
    assert (await waiting).index == 1


async def test_put_never_waits_and_is_false_on_a_settled_lease(store):
    made = buffer(store=store)
    lease = await made.admit()
    assert made.put(lease, unit_for(store, "a")) is True
    assert made.put(lease, unit_for(store, "a")) is False, "a second unit of one lease"
    late = await made.admit()
    assert made.settle(late, "timeout") is True
    assert made.put(late, unit_for(store, "b")) is False
    assert made.store.scan() == [lease.lease_id], "nothing of a settled lease stays behind"


async def test_the_first_settle_wins(store):
    drops = []
    made = buffer(store=store, on_drop=lambda lease, reason, unit: drops.append((reason, unit and unit.unit_id)))
    lease = await made.admit()
    made.put(lease, unit_for(store, "a"))
    assert made.settle(lease, "stale") is True
    assert made.settle(lease, "timeout") is False
    assert lease.outcome == "stale" and drops == [("stale", "a")]
    assert dict(made.ledger.dropped) == {"stale": 1} and made.source.returned == {"stale": 1}


async def test_take_waits_for_enough_and_sorts_by_lease_index(store):
    made = buffer(batch=3, store=store)
    leases = [await made.admit() for _ in range(4)]
    for number in (3, 1):
        made.put(leases[number], unit_for(store, str(number)))
    waiting = await blocked(made.take(3, 0))
    made.put(leases[0], unit_for(store, "0"))
    taken = await waiting
    assert [lease.index for lease, _ in taken] == [0, 1, 3]
    assert [unit.unit_id for _, unit in taken] == ["0", "1", "3"], "each with its own unit"


async def test_a_taken_lease_cannot_be_cancelled(store):
    made = buffer(batch=1, store=store)
    lease = await made.admit()
    made.put(lease, unit_for(store, "a"))
    await made.take(1, 0)
    with pytest.raises(ConservationError, match="0-0"):
        made.settle(lease, "timeout")
    assert made.settle(lease, "filtered"), "only the trainer's own filter may end it"


async def test_a_batch_that_never_came_together_is_ready_again(store):
    made = buffer(batch=2, store=store)
    lease = await made.admit()
    made.put(lease, unit_for(store, "a"))
    [(taken, _)] = await made.take(1, 0)
    made.untake(taken)
    [(again, unit)] = await made.take(1, 0)
    assert again is lease and unit.unit_id == "a"


async def test_a_short_batch_only_at_the_end_and_then_none(store):
    made = buffer(batch=2, tasks=3, store=store)
    for _ in range(3):
        lease = await made.admit()
        made.put(lease, unit_for(store, str(lease.index)))
    await trained(made, [lease for lease, _ in await made.take(2, 0)])
    ended = await blocked(made.admit())  # what is ready might still be recycled
    last = await made.take(2, 0)
    assert [lease.index for lease, _ in last] == [2]
    await trained(made, [lease for lease, _ in last])
    with pytest.raises(BufferClosed):
        await asyncio.wait_for(ended, 1.0)
    assert await made.take(2, 0) == []


async def test_a_running_lease_keeps_take_waiting_at_the_end(store):
    made = buffer(batch=2, tasks=2, store=store)
    first, second = await made.admit(), await made.admit()
    made.put(first, unit_for(store, "a"))
    ended = asyncio.ensure_future(made.admit())
    waiting = await blocked(made.take(2, 0))
    made.settle(second, "timeout")
    assert [lease.index for lease, _ in await waiting] == [0]
    await trained(made, [first])
    with pytest.raises(BufferClosed):
        await asyncio.wait_for(ended, 1.0)


async def test_close_wakes_every_waiter_and_gives_the_pool_back(store):
    made = buffer(batch=2, ahead=0, store=store)
    first, second = await made.admit(), await made.admit()
    admitting = [await blocked(made.admit()) for _ in range(2)]
    taking = await blocked(made.take(2, 0))
    made.put(first, unit_for(store, "a"))
    made.pool.append((second.task, None))
    made.close()
    for task in admitting:
        with pytest.raises(BufferClosed):
            await asyncio.wait_for(task, 1.0)
    made.settle(second, RECYCLED)
    assert [lease.index for lease, _ in await asyncio.wait_for(taking, 1.0)] == [0]
    assert made.source.returned == {"end": 1, RECYCLED: 1} and not made.pool, "nothing is recycled into a closed pool"
    with pytest.raises(BufferClosed):
        await made.admit()
