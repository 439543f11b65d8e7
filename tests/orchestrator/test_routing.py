"""Which engine serves a request: by load, by group, by prefix, and where its keys and values lie."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

import numpy as np
import pytest

from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.routing import ROUTING
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.protocols import TrajectoryRequest
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.native.engine import build_native
from headrace.types import RequestKey
from rollout.engines.engine_models import ask, endless, folder_of, prompt_of


class Front:
    """Three slots and a routing, without engines: requests go out and come back by hand."""

    def __init__(self, kind: str) -> None:
        self.routing = ROUTING[kind]()
        self.slots = [EngineSlot(f"engine-{i}", None) for i in range(3)]

    def send(self, request) -> int:
        slot = self.routing.pick(request, self.slots)
        slot.calls[request.request_id] = None
        self.routing.started(request, slot)
        return int(slot.name[-1])

    def back(self, request, at: int) -> None:
        del self.slots[at].calls[request.request_id]
        self.routing.ended(request, self.slots[at])


def test_load_spreads_siblings_and_fills_gaps():
    front = Front("load")
    requests = [ask(prompt_of(4), "g", member=m) for m in range(7)]
    assert [front.send(one) for one in requests[:6]] == [0, 1, 2, 0, 1, 2]
    front.back(requests[1], 1)
    assert front.send(requests[6]) == 1


def test_siblings_stay_together_while_one_of_them_is_there():
    front = Front("group")
    a, b = ([ask(prompt_of(4), name, member=m) for m in range(4)] for name in "ab")
    assert [front.send(one) for one in (*a[:3], *b[:3])] == [0, 0, 0, 1, 1, 1]
    front.back(a[0], 0)
    front.back(a[1], 0)
    assert front.send(a[3]) == 0
    for one in a[2:]:
        front.back(one, 0)
    front.send(ask(prompt_of(4), "c"))
    assert front.send(ask(prompt_of(4), "a", member=9)) == 2  # nobody of the group is left: the idlest


def test_a_group_whose_engine_is_lost_finds_another_home():
    front = Front("group")
    members = [ask(prompt_of(4), "g", member=m) for m in range(3)]
    assert front.send(members[0]) == 0
    lost = front.slots.pop(0)
    second = front.routing.pick(members[1], front.slots)
    assert second is not lost
    front.routing.started(members[1], second)
    front.routing.ended(members[0], lost)
    assert front.routing.pick(members[2], front.slots) is second


def test_a_prefix_goes_where_the_longest_beginning_of_it_went_under_these_weights():
    front = Front("prefix")
    system, other = prompt_of(64, 1), prompt_of(64, 2)
    assert front.send(ask([*system, 5], "a")) == 0
    assert front.send(ask([*other, 5], "b")) == 1
    assert front.send(ask([*system, 6], "c")) == 0
    assert front.send(ask([*other, *prompt_of(40)], "d")) == 1
    assert front.send(ask(prompt_of(10, 9), "e")) == 2  # unknown: the idlest
    front.slots[0].version = 1  # what it has cached was made by older weights
    assert front.send(ask([*system, 7], "f")) == 2


def test_a_prefix_is_no_reason_to_wait_behind_many():
    front = Front("prefix")
    sent = [front.send(ask(prompt_of(40), f"r{i}")) for i in range(24)]
    assert sent[:8] == [0] * 8 and set(sent) == {0, 1, 2}


@pytest.mark.parametrize("kind", ROUTING)
def test_kept_keys_and_values_draw_their_request_to_them(kind):
    front = Front(kind)
    assert front.send(ask(prompt_of(4), "a", kv_handle="engine-2:7")) == 2
    assert front.send(ask(prompt_of(4, 1), "b", kv_handle="engine-9:7")) == 0  # gone
    assert front.routing.pick(ask(prompt_of(4), "c"), []) is None


async def hits(routing: str) -> tuple[int, list[int]]:
    """Prompt tokens found in caches, and requests served by each of three engines: four conversations that come in turn."""
    runtime = LocalRuntime(lambda event: None)
    dispatcher = Dispatcher(generate_timeout_s=30.0, rejoin_timeout_s=10.0, routing=routing)
    engine = EngineConfig(max_running=8, block_size=4)
    for i in range(3):
        factory = partial(build_native, inline=True)
        proxy = await runtime.spawn(f"engine-{i}", factory, engine, folder_of(), "float32", None, "keep")
        dispatcher.join(EngineSlot(f"engine-{i}", proxy))
    dispatcher.open_gate()
    rng = np.random.default_rng(0)
    for turn in range(4):
        order = rng.permutation(4)
        await asyncio.gather(
            *(dispatcher.generate(ask(prompt_of(40, int(c))[: 36 + turn], f"c{c}.{turn}", **endless(4))) for c in order)
        )
    stats = [await slot.proxy.stats() for slot in dispatcher.live()]
    await runtime.close()
    return sum(one.cached_prompt_tokens for one in stats), [one.generated_tokens // 4 for one in stats]


async def test_routing_by_prefix_finds_more_in_the_caches_of_real_engines():
    by_load, _ = await hits("load")
    by_prefix, served = await hits("prefix")
    # Every later turn of every conversation finds all of the turn before it.
    assert by_prefix >= 3 * 4 * 35 > by_load
    assert min(served) > 0 and sum(served) == 16


async def test_a_restored_generation_returns_to_the_engine_that_kept_it():
    runtime = LocalRuntime(lambda event: None)
    dispatcher = Dispatcher(generate_timeout_s=30.0, rejoin_timeout_s=10.0)
    for i in range(2):
        factory = partial(build_native, inline=True)
        proxy = await runtime.spawn(
            f"engine-{i}", factory, EngineConfig(block_size=4), folder_of(), "float32", None, "keep"
        )
        dispatcher.join(EngineSlot(f"engine-{i}", proxy))
    dispatcher.open_gate()
    first, second = (dataclasses.replace(ask(prompt_of(9), name, **endless(60)), keep_kv=True) for name in "ab")
    tasks = [asyncio.ensure_future(dispatcher.generate(one)) for one in (first, second)]
    while min([(await slot.proxy.stats()).generated_tokens for slot in dispatcher.live()]) < 5:
        await asyncio.sleep(0)
    await dispatcher.abort(second.request_id)
    part = await tasks[1]
    assert part.kv_handle.startswith("engine-1:")
    await dispatcher.abort(first.request_id)
    await tasks[0]
    resumed = ask(prompt_of(9), "b", attempt=1, prefix=part, kv_handle=part.kv_handle, **endless(60))
    assert (await dispatcher.generate(resumed)).token_ids.size == 60
    stats = [await slot.proxy.stats() for slot in dispatcher.live()]
    assert stats[1].generated_tokens >= 60 and stats[1].prompt_tokens == 9
    await runtime.close()


@pytest.mark.parametrize("kind", ROUTING)
def test_what_has_no_prompt_is_routed_too(kind):
    """Trajectories of control: no prefix, and no keys and values."""
    front = Front(kind)
    requests = [TrajectoryRequest(key=RequestKey(lease_id=name, member=0, attempt=0)) for name in "abc"]
    places = [front.send(request) for request in requests]
    assert sorted(places) == [0, 1, 2]
    for request, place in zip(requests, places, strict=True):
        front.back(request, place)
