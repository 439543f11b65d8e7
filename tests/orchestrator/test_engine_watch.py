"""The watch over engines: a slow one is kept, a silent one given up, whoever else listens to them."""

import asyncio

import pytest

from headrace.orchestrator.dispatcher import Call, Dispatcher, EngineSlot
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.types import EngineStats


class Engine:
    """Makes a token every `token_s` seconds and knows the one request that it has."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s

    async def stats(self) -> EngineStats:
        tokens = int(asyncio.get_running_loop().time() / self.token_s)
        return EngineStats(running=1, generated_tokens=tokens, progress={"request": tokens})


async def fenced_after(token_s: float, seconds: float) -> list[str]:
    fenced: list[str] = []
    dispatcher = Dispatcher(
        generate_timeout_s=120.0, rejoin_timeout_s=60.0, on_fenced=lambda slot, reason: fenced.append(reason)
    )
    slot = EngineSlot("engine-0", Engine(token_s))
    dispatcher.join(slot)
    slot.calls["request"] = Call(asyncio.get_running_loop().create_future(), "group")
    watch = asyncio.create_task(dispatcher.watch())

    async def listen() -> None:
        while True:
            await asyncio.sleep(1.0)
            slot.heard(await slot.proxy.stats())

    listening = asyncio.create_task(listen())
    await asyncio.sleep(seconds)
    for task in (watch, listening):
        task.cancel()
    return fenced


@pytest.mark.parametrize("token_s", [7.0, 45.0, 100.0])
def test_an_engine_that_is_slow_is_kept_however_often_others_ask_it(token_s):
    assert run_simulated(fenced_after(token_s, 1000.0)) == []


def test_an_engine_that_makes_no_token_is_given_up():
    (reason,) = run_simulated(fenced_after(1e9, 200.0))
    assert "made no token for 120 s" in reason
