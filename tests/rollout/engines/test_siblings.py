"""Sequences with the same tokens behind them are one row of a pass, and fill one block, until they part."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.exchange.channels.in_process import InProcessChannel
from headrace.rollout.engines.native.siblings import distinct
from rollout.engines.engine_models import (
    EXPERTS,
    FAMILIES,
    ask,
    build_engine,
    build_model,
    endless,
    folder_of,
    plain_logprobs,
    prompt_of,
    publish,
    reference,
    sampled,
    until,
)

NARROW = 0.35
"""A temperature at which the random models' siblings go on alike for some tokens, and then part."""


def count_rows(engine) -> list[int]:
    """Rows that decode, of each pass from now on."""
    rows, run = [], engine.core._batch

    def counting(pieces, decoding):
        rows.append(len(decoding))
        return run(pieces, decoding)

    engine.core._batch = counting
    return rows


def without_sharing(engine):
    """The same engine, to whom everybody's history is different."""
    engine.core.histories.begin = lambda: 0
    return engine


def nothing_is_held(engine) -> bool:
    table = engine.core.table
    return table.room == table.total and not any(table.counts) and not engine.core.places.waiting


async def run(engine, requests):
    return await asyncio.gather(*map(engine.generate, requests))


async def test_siblings_that_draw_alike_are_one_row():
    engine = build_engine()
    rows = count_rows(engine)
    requests = [ask(prompt_of(9), "g", member=m, temperature=0.0, **endless(20)) for m in range(8)]
    first, *others = await run(engine, requests)
    assert all(one.token_ids.tolist() == first.token_ids.tolist() for one in others)
    assert max(rows) == 1 and engine.core.shared_tokens == 7 * 19 and (await engine.stats()).generated_tokens == 160
    assert nothing_is_held(engine)
    await engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_siblings_that_part_go_on_each_in_its_own_way(family):
    engine = build_engine(folder=folder_of(family))
    requests = [ask(prompt_of(13), "g", member=m, temperature=NARROW, **endless(30)) for m in range(8)]
    together = await run(engine, requests)
    assert 0 < engine.core.shared_tokens < 7 * 29
    assert len({tuple(one.token_ids.tolist()) for one in together}) > 1
    cold = without_sharing(build_engine(folder=folder_of(family)))
    for request, one in zip(requests, together, strict=True):
        assert one.token_ids.tolist() == (await cold.generate(request)).token_ids.tolist()
        expected = plain_logprobs(reference(family), request, one, temperature=NARROW)
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
    assert cold.core.shared_tokens == 0 and nothing_is_held(engine)
    for each in (engine, cold):
        await each.close()


@pytest.mark.parametrize("family", EXPERTS)
async def test_experts_of_a_shared_row_are_everybodys(family):
    recorded = dict(temperature=NARROW, record_expert_routing=True)
    requests = [ask(prompt_of(13), "g", member=m, **recorded, **endless(12)) for m in range(6)]
    engine, cold = (build_engine(folder=folder_of(family)) for _ in range(2))
    for one, alone in zip(await run(engine, requests), await run(without_sharing(cold), requests), strict=True):
        assert np.array_equal(one.expert_routing, alone.expert_routing)
        assert np.array_equal(one.prompt_routing, alone.prompt_routing)
    assert engine.core.shared_tokens > 0
    for each in (engine, cold):
        await each.close()


async def test_weights_that_change_under_siblings_are_the_same_for_all():
    """What they share at the swap has the same keys and values of both versions; who comes later has others."""
    outputs = []
    for share in (True, False):
        channel = InProcessChannel()
        engine = build_engine(channel=channel)
        if not share:
            without_sharing(engine)
        await engine.commit(publish(channel, reference(), 1))
        requests = [ask(prompt_of(9), "g", member=m, temperature=NARROW, **endless(24)) for m in range(5)]
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in requests]
        await until(lambda s, r=requests[0]: sampled(s, r) >= 5, engine)
        before = engine.core.shared_tokens
        await engine.commit(publish(channel, build_model("llama", seed=5), 2))
        late = [ask(prompt_of(9), "g", member=m, temperature=NARROW, **endless(8)) for m in range(5, 8)]
        got = await asyncio.gather(*tasks, *map(engine.generate, late))
        outputs.append(got)
        assert (engine.core.shared_tokens > before > 0) == share and nothing_is_held(engine)
        assert all(set(one.policy_versions.tolist()) == {1, 2} for one in got[:5])
        assert all(set(one.policy_versions.tolist()) == {2} for one in got[5:])
        await engine.close()
    for shared, alone in zip(*outputs, strict=True):
        assert shared.token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(shared.logprobs, alone.logprobs, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    more_tokens=st.sampled_from([0, 4, 20, 60, 500]),
    block_size=st.sampled_from([1, 4, 16]),
    preemption=st.sampled_from(["recompute", "save"]),
    cut=st.booleans(),
)
def test_sharing_changes_no_token_whatever_happens(seed, more_tokens, block_size, preemption, cut):
    """Groups of several prompts in memory for the longest alone and little more, some cut short and taken up again, against a
    roomy engine that shares nothing."""
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 18))
    requests = [
        ask(prompt_of(length, int(group)), f"g{group}", member=m, temperature=float(heat), **endless(int(count)))
        for group in range(3)
        for m in range(5)
        for heat, count in [(random.choice([0.0, NARROW, 1.0]), random.integers(1, 22))]
    ]
    random.shuffle(requests)
    longest = max(length + one.sampling.max_tokens for one in requests)
    kv_tokens = -(-longest // block_size) * block_size + more_tokens
    victims = set(random.choice(len(requests), 4, replace=False).tolist()) if cut else set()

    async def generate(engine, number, request):
        task = asyncio.ensure_future(engine.generate(request))
        if number in victims and request.sampling.max_tokens > 3:
            for _ in range(int(number) + 2):
                await asyncio.sleep(0)
            part = await engine.abort(request.request_id)
            if part is not None:
                again = ask(
                    request.prompt_ids,
                    request.group_id,
                    member=request.key.member,
                    attempt=1,
                    prefix=await task,
                    temperature=request.sampling.temperature,
                    **endless(request.sampling.max_tokens),
                )
                return await engine.generate(again)
        return await task

    async def all_of(engine):
        got = await asyncio.gather(*(generate(engine, n, one) for n, one in enumerate(requests)))
        assert nothing_is_held(engine)
        await engine.close()
        return got, engine.core.shared_tokens

    async def both():
        tight = build_engine(kv_tokens=kv_tokens, block_size=block_size, preemption=preemption, max_running=9)
        return await all_of(tight), await all_of(without_sharing(build_engine(max_running=3)))

    (together, _), (alone, none) = asyncio.run(both())
    assert none == 0
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_places_name_the_first_of_each_history():
    class One:
        def __init__(self, history):
            self.history = history

    a, b, c, d, e = (One(history) for history in (3, 0, 3, 0, 5))
    assert distinct([a, b, c, d, e]) == ([a, b, d, e], [0, 1, 0, 2, 3])
    assert distinct([]) == ([], [])


async def test_who_needs_the_whole_store_gives_up_the_block_that_it_would_have_copied():
    engine = build_engine(kv_tokens=16, block_size=4)
    beginning = prompt_of(6)
    await engine.generate(ask(beginning, "first", **endless(1)))
    request = ask(beginning + prompt_of(9, 1), "whole", **endless(1))
    got = await asyncio.wait_for(engine.generate(request), 20)
    np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(), request, got), atol=1e-4)
    assert nothing_is_held(engine)
    await engine.close()
