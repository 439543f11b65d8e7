"""A request whose caller is gone does not run on: every request on an engine belongs to somebody who waits for it."""

from __future__ import annotations

import asyncio

import numpy as np

from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.rollout.engines.scripted import ScriptedCosts, build_scripted
from headrace.types import GenerateRequest, RequestKey, SamplingParams


def test_a_cancelled_request_is_aborted_on_its_engine():
    async def main() -> tuple[int, int]:
        runtime = LocalRuntime(lambda event: None)
        proxy = await runtime.spawn("engine-0", build_scripted, ScriptedCosts(length=1000.0, length_sigma=0.0))
        dispatcher = Dispatcher(generate_timeout_s=10.0, rejoin_timeout_s=10.0)
        dispatcher.join(EngineSlot("engine-0", proxy))
        dispatcher.open_gate()
        request = GenerateRequest(
            key=RequestKey(lease_id="0-0"),
            group_id="0-0",
            prompt_ids=np.array([1]),
            sampling=SamplingParams(max_tokens=1000, seed=0),
        )
        call = asyncio.create_task(dispatcher.generate(request))
        await asyncio.sleep(0.5)
        before = (await proxy.stats()).running
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.5)
        after = (await proxy.stats()).running
        await runtime.close()
        return before, after

    assert run_simulated(main()) == (1, 0)
