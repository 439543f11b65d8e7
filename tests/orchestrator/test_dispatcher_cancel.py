"""A request whose caller is gone does not run on, and one whose engine is gone does not wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from headrace.errors import PartFailed, RequestRefused, WorkerDied
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.rollout.engines.scripted import ScriptedCosts, build_scripted
from headrace.types import EngineStats, GenerateRequest, RequestKey, SamplingParams

TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
"""Requests in messages of their own, or many in one."""


def a_request(name: str, tokens: int = 1000) -> GenerateRequest:
    return GenerateRequest(
        key=RequestKey(lease_id=name),
        group_id=name,
        prompt_ids=np.array([1]),
        sampling=SamplingParams(max_tokens=tokens, seed=0),
    )


def with_a_call(together: bool, scene: Callable[[Dispatcher, EngineSlot, asyncio.Task[Any]], Awaitable[Any]]) -> Any:
    """What the scene returns, half a second after a long request was sent to the only engine."""

    async def main() -> Any:
        runtime = LocalRuntime(lambda event: None)
        proxy = await runtime.spawn("engine-0", build_scripted, ScriptedCosts(length=1000.0, length_sigma=0.0))
        dispatcher = Dispatcher(generate_timeout_s=10.0, rejoin_timeout_s=1.0)
        slot = EngineSlot("engine-0", proxy, together=together)
        dispatcher.join(slot)
        dispatcher.open_gate()
        call = asyncio.create_task(dispatcher.generate(a_request("0-0")))
        await asyncio.sleep(0.5)
        found = await scene(dispatcher, slot, call)
        assert not slot.calls
        await runtime.close()
        return found

    return run_simulated(main())


@TOGETHER
def test_a_cancelled_request_is_aborted_on_its_engine(together):
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> tuple[int, int]:
        before = (await slot.proxy.stats()).running
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.5)
        return before, (await slot.proxy.stats()).running

    assert with_a_call(together, scene) == (1, 0)


@TOGETHER
@pytest.mark.parametrize("dies", ["fenced", "killed"])
def test_a_call_on_an_engine_that_is_lost_fails_and_its_caller_goes_on(dies, together):
    """The caller gets an error that it may answer to, and is not itself cancelled: it can wait again."""

    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> str:
        async def caller() -> str:
            with pytest.raises(WorkerDied):
                await dispatcher.generate(a_request("0-1"))
            await asyncio.sleep(1.0)
            return "went on"

        went = asyncio.create_task(caller())
        await asyncio.sleep(0.5)
        if dies == "fenced":
            dispatcher.fence(slot, "it is tried")
        else:
            await slot.proxy.kill()
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], WorkerDied)
        assert slot.fenced and slot not in dispatcher.live()
        return await went

    assert with_a_call(together, scene) == "went on"


@TOGETHER
@pytest.mark.parametrize("first", ["caller", "engine"])
def test_a_caller_that_is_cancelled_as_its_engine_is_lost_ends_as_cancelled(first, together):
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> bool:
        if first == "caller":
            call.cancel()
        dispatcher.fence(slot, "it is tried")
        if first == "engine":
            call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    assert with_a_call(together, scene)


def test_a_request_that_is_cancelled_as_it_leaves_does_not_run_on():
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        going, gone = (asyncio.create_task(dispatcher.generate(a_request(name))) for name in ("0-1", "0-2"))
        asyncio.get_running_loop().call_soon(gone.cancel)  # in the turn in which both ask
        await asyncio.sleep(0.5)
        known = set((await slot.proxy.stats()).progress)
        for task in (call, going):
            task.cancel()
        await asyncio.gather(call, going, gone, return_exceptions=True)
        return known, gone.cancelled()

    assert with_a_call(True, scene) == ({a_request("0-0").request_id, a_request("0-1").request_id}, True)


def test_an_engine_that_went_while_nothing_ran_on_it_is_missed_by_who_asks_next():
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        fenced = []
        dispatcher.on_fenced = lambda slot, reason: fenced.append(slot.name)
        call.cancel()
        await asyncio.wait([call])
        await slot.proxy.kill()
        await asyncio.sleep(0.1)
        before = list(fenced)
        with pytest.raises(WorkerDied):
            await dispatcher.generate(a_request("0-1"))
        return before, fenced

    assert with_a_call(True, scene) == ([], ["engine-0"])


def test_an_engine_that_refuses_all_fails_each_request_and_stays():
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        async def refuse(requests: Any) -> None:
            raise PartFailed("closed")

        slot.proxy.__dict__["submit"] = refuse
        with pytest.raises(PartFailed, match="closed"):
            await dispatcher.generate(a_request("0-1"))
        call.cancel()
        await asyncio.wait([call])
        return slot.fenced

    assert with_a_call(True, scene) is False


@TOGETHER
def test_a_second_request_of_a_name_that_runs_is_refused_and_the_first_goes_on(together):
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        with pytest.raises(RequestRefused, match="runs already"):
            await dispatcher.generate(a_request("0-0"))
        return (await call).finish_reason

    assert with_a_call(together, scene) == "length"


@TOGETHER
def test_a_name_that_is_used_again_gets_its_own_end_and_not_the_one_before(together):
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        call.cancel()
        await asyncio.wait([call])
        again = await dispatcher.generate(a_request("0-0", tokens=5))
        return again.finish_reason, len(again.token_ids)

    assert with_a_call(together, scene) == ("length", 5)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_abort_does_not_overtake_its_request(turns):
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        asked = asyncio.create_task(dispatcher.generate(a_request("0-1")))
        for _ in range(turns):
            await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        await dispatcher.abort_all()
        await dispatcher.drained()
        assert asyncio.get_running_loop().time() - began < 1.0
        return {(await one).finish_reason for one in (call, asked)}

    assert with_a_call(True, scene) == {"abort"}


def test_a_request_that_cannot_travel_fails_alone():
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        submit = slot.proxy.submit

        async def pack(requests: Any) -> None:
            if any(one.group_id == "0-2" for one in requests):
                raise TypeError("cannot pickle")
            await submit(requests)

        slot.proxy.__dict__["submit"] = pack
        asked = [dispatcher.generate(a_request(name, tokens=3)) for name in ("0-1", "0-2", "0-3")]
        found = await asyncio.gather(*asked, return_exceptions=True)
        call.cancel()
        await asyncio.wait([call])
        return [getattr(one, "finish_reason", type(one)) for one in found]

    assert with_a_call(True, scene) == ["length", TypeError, "length"]


def test_an_engine_whose_ends_are_lost_is_given_up_and_says_why():
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        fenced = []
        dispatcher.on_fenced = lambda slot, reason: fenced.append(reason)
        call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0.1)  # its end has come, so nobody listens

        async def unreadable() -> None:
            raise PartFailed("unreadable reply")

        slot.proxy.__dict__["ended"] = unreadable
        with pytest.raises(PartFailed, match="unreadable reply"):
            await dispatcher.generate(a_request("0-1"))
        return fenced

    assert with_a_call(True, scene) == ["unreadable reply"]


def test_a_request_that_its_engine_forgot_is_awaited_no_longer_and_its_name_is_free():
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> Any:
        async def knows_nothing() -> EngineStats:
            return EngineStats()

        slot.proxy.__dict__["stats"] = knows_nothing
        for _ in range(3):
            await dispatcher._examine(slot)
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], WorkerDied)
        return slot.mailbox.awaited, dispatcher.ignored_replies, slot.fenced

    assert with_a_call(True, scene) == ({}, 1, False)
