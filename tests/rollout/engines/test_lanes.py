"""Lanes give what blocks give, share what siblings share, and are gone when nobody decodes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.exchange.channels.in_process import InProcessChannel
from rollout.engines.engine_models import ask, build_engine, build_model, endless, prompt_of, publish, until


def crowd(seed=0):
    """Three groups of siblings, single requests, prompts that end inside and at the end of a block, lengths past a lane's."""
    requests = []
    for group, (length, siblings) in enumerate([(21, 4), (8, 3), (1, 1), (50, 1)]):
        for member in range(siblings):
            count = 5 + (37 * (group + member + seed)) % 90
            requests.append(ask(prompt_of(length, group), f"g{group}", member=member, **endless(count)))
    return requests


async def run(requests, lanes=True, **engine):
    made = build_engine(**engine)
    if not lanes:
        made.core.lanes = None
    found = await asyncio.gather(*map(made.generate, requests))
    return made, found


def assert_alike(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def empty(lanes) -> bool:
    return not lanes._own and not lanes._shared and not any(shelf.lanes for shelf in lanes._shelves.values())


@pytest.mark.parametrize(
    "engine", [{}, {"max_running": 3}, {"kv_tokens": 240}, {"kv_tokens": 240, "preemption": "save"}]
)
async def test_lanes_give_what_blocks_give(engine):
    blocks, expected = await run(crowd(), lanes=False, **engine)
    lanes, found = await run(crowd(), **engine)
    assert_alike(expected, found)
    assert empty(lanes.core.lanes)
    await blocks.close()
    await lanes.close()


async def test_a_swap_in_the_middle_leaves_lanes_right():
    answers = []
    for with_lanes in (False, True):
        channel = InProcessChannel()
        engine = build_engine(channel=channel)
        if not with_lanes:
            engine.core.lanes = None
        running = [asyncio.ensure_future(engine.generate(request)) for request in crowd(1)]
        await until(lambda stats: stats.generated_tokens >= 40, engine)
        await engine.commit(publish(channel, build_model("llama", seed=5), 2))
        answers.append(await asyncio.gather(*running))
        assert {2, -1} == {int(v) for got in answers[-1] for v in got.policy_versions}
        await engine.close()
    assert_alike(*answers)


async def test_siblings_read_the_blocks_of_their_prompt_together():
    engine = build_engine()
    plan, seen = engine.core.lanes.plan, []

    def watched(decoding):
        made = plan(decoding)
        if made is not None:
            own = [(lane.start, lane.filled) for part in made.own for lane in part.shelf.lanes]
            common = [(len(lane.readers), lane.filled) for part in made.shared for lane in part.shelf.lanes]
            seen.append((common, own))
        return made

    engine.core.lanes.plan = watched
    requests = [ask(prompt_of(22), member=member, **endless(6)) for member in range(8)]
    await asyncio.gather(*map(engine.generate, requests))
    # Five whole blocks of four in common; two tokens of the prompt and what is sampled for each alone.
    assert seen[0][0] == [(8, 20)]
    assert seen[0][1] == [(20, 3)] * 8 and seen[-1][1][0] == (20, 7)
    await engine.close()


async def test_without_memory_for_lanes_blocks_are_read():
    engine = build_engine()
    engine.core.lanes.limit = 520  # a few lanes, not eight
    plan, made = engine.core.lanes.plan, []
    engine.core.lanes.plan = lambda decoding: made.append(found := plan(decoding)) or found
    found = await asyncio.gather(*map(engine.generate, crowd()))
    assert any(one is None for one in made) and any(one is not None for one in made)
    other, expected = await run(crowd(), lanes=False)
    assert_alike(expected, found)
    assert empty(engine.core.lanes)
    await engine.close()
    await other.close()


async def test_sleep_gives_the_memory_of_lanes_back():
    engine = build_engine()
    running = asyncio.ensure_future(engine.generate(ask(prompt_of(9), **endless(40))))
    await until(lambda stats: stats.generated_tokens >= 5, engine)
    assert engine.core.lanes._shelves
    await engine.sleep(1)
    assert not engine.core.lanes._shelves and empty(engine.core.lanes)
    await engine.wake()
    assert (await running).token_ids.size == 40
    await engine.close()
