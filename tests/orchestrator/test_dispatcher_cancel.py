"""A request whose caller is gone does not run on, and one whose engine is gone does not wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from headrace.errors import WorkerDied
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.rollout.engines.scripted import ScriptedCosts, build_scripted
from headrace.types import GenerateRequest, RequestKey, SamplingParams


def with_a_call(scene: Callable[[Dispatcher, EngineSlot, asyncio.Task[Any]], Awaitable[Any]]) -> Any:
    """What the scene returns, half a second after a long request was sent to the only engine."""

    async def main() -> Any:
        runtime = LocalRuntime(lambda event: None)
        proxy = await runtime.spawn("engine-0", build_scripted, ScriptedCosts(length=1000.0, length_sigma=0.0))
        dispatcher = Dispatcher(generate_timeout_s=10.0, rejoin_timeout_s=1.0)
        slot = EngineSlot("engine-0", proxy)
        dispatcher.join(slot)
        dispatcher.open_gate()
        request = GenerateRequest(
            key=RequestKey(lease_id="0-0"),
            group_id="0-0",
            prompt_ids=np.array([1]),
            sampling=SamplingParams(max_tokens=1000, seed=0),
        )
        call = asyncio.create_task(dispatcher.generate(request))
        await asyncio.sleep(0.5)
        found = await scene(dispatcher, slot, call)
        assert not slot.calls
        await runtime.close()
        return found

    return run_simulated(main())


def test_a_cancelled_request_is_aborted_on_its_engine():
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> tuple[int, int]:
        before = (await slot.proxy.stats()).running
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.5)
        return before, (await slot.proxy.stats()).running

    assert with_a_call(scene) == (1, 0)


@pytest.mark.parametrize("dies", ["fenced", "killed"])
def test_a_call_on_an_engine_that_is_lost_fails_and_its_caller_goes_on(dies):
    """The caller gets an error that it may answer to, and is not itself cancelled: it can wait again."""

    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> str:
        async def caller() -> str:
            request = GenerateRequest(
                key=RequestKey(lease_id="0-1"),
                group_id="0-1",
                prompt_ids=np.array([1]),
                sampling=SamplingParams(max_tokens=1000, seed=1),
            )
            with pytest.raises(WorkerDied):
                await dispatcher.generate(request)
            await asyncio.sleep(1.0)
            return "went on"

        went = asyncio.create_task(caller())
        await asyncio.sleep(0.5)
        if dies == "fenced":
            dispatcher.fence(slot, "it is tried")
        else:
            await slot.proxy.kill()
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], WorkerDied)
        return await went

    assert with_a_call(scene) == "went on"


@pytest.mark.parametrize("first", ["caller", "engine"])
def test_a_caller_that_is_cancelled_as_its_engine_is_lost_ends_as_cancelled(first):
    async def scene(dispatcher: Dispatcher, slot: EngineSlot, call: asyncio.Task[Any]) -> bool:
        if first == "caller":
            call.cancel()
        dispatcher.fence(slot, "it is tried")
        if first == "engine":
            call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    assert with_a_call(scene)
