"""What the driver of a core promises whatever happens in its thread and in its loop."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import PartFailed
from headrace.rollout.engines.sequences import Sequence
from rollout.engines.engine_models import ask, build_engine, endless, prompt_of, until


async def test_an_end_that_cannot_be_told_fails_that_request_alone(monkeypatch):
    engine = build_engine(inline=False)
    requests = [ask(prompt_of(5), "g", member=m, **endless(6)) for m in range(4)]
    generation = Sequence.generation

    def breaks(self, start=0):
        if self.request is requests[1]:
            raise ValueError("it cannot be put together")
        return generation(self, start)

    monkeypatch.setattr(Sequence, "generation", breaks)
    got = await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests), return_exceptions=True), 20)
    assert isinstance(got[1], PartFailed) and "it cannot be put together" in str(got[1])
    assert all(len(one.token_ids) == 6 for one in (got[0], *got[2:]))
    await engine.close()


@pytest.mark.parametrize("inline", [True, False])
async def test_what_is_asked_for_while_an_engine_closes_ends(inline):
    for turns in range(6):
        engine = build_engine(inline=inline)
        running = asyncio.ensure_future(engine.generate(ask(prompt_of(5), "a", **endless(200))))
        await until(lambda s: s.running == 1, engine)
        closing = asyncio.ensure_future(engine.close())
        late = []
        for number in range(turns):
            late.append(asyncio.ensure_future(engine.generate(ask(prompt_of(5), f"late{number}", **endless(4)))))
            await asyncio.sleep(0)
        ended = await asyncio.wait_for(asyncio.gather(running, *late, return_exceptions=True), 20)
        assert all(isinstance(one, PartFailed) for one in ended)
        await closing
