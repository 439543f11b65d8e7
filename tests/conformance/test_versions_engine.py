"""Conformance V1, V5 and V6 on the engines: versions in mid-request, no stale cache, one budget over all resumptions."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.exchange.channels.in_process import InProcessChannel
from rollout.engines.engine_models import (
    ask,
    build_engine,
    build_model,
    endless,
    forcing,
    prompt_of,
    publish,
    reference,
    sampled,
    until,
)

pytestmark = pytest.mark.parametrize("kind", ["native", "hf"])


async def test_v1_tokens_before_a_swap_carry_the_old_version_and_tokens_after_it_the_new(kind):
    channel = InProcessChannel()
    engine = build_engine(kind, channel=channel)
    forced = {1: 20, 2: 30, 3: 40}
    await engine.commit(channel.publish(forcing(reference(), forced[1]), 1))
    request = ask(prompt_of(5), **endless(40))
    task = asyncio.ensure_future(engine.generate(request))
    for version, at in ((2, 7), (3, 19)):
        await until(lambda s, at=at: sampled(s, request) >= at, engine)
        await engine.commit(channel.publish(forcing(reference(), forced[version]), version))
    got = await task
    assert [forced[v] for v in got.policy_versions.tolist()] == got.token_ids.tolist()
    assert np.unique(got.policy_versions).tolist() == [1, 2, 3]
    await engine.close()


async def test_v5_after_a_large_update_the_same_prompt_is_answered_as_by_a_cold_engine(kind):
    other = build_model("llama", seed=11)
    warm_channel, cold_channel = InProcessChannel(), InProcessChannel()
    warm, cold = build_engine(kind, channel=warm_channel), build_engine(kind, channel=cold_channel)
    await warm.commit(publish(warm_channel, reference(), 1))
    await warm.generate(ask(prompt_of(24), "before", **endless(6)))
    await warm.commit(publish(warm_channel, other, 2))
    await cold.commit(publish(cold_channel, other, 2))
    a = await warm.generate(ask(prompt_of(24), "after", **endless(12)))
    b = await cold.generate(ask(prompt_of(24), "after", **endless(12)))
    assert a.token_ids.tolist() == b.token_ids.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6)
    assert (await warm.stats()).cached_prompt_tokens == 0
    await warm.close()
    await cold.close()


@pytest.mark.parametrize("times", [1, 4])
async def test_v6_a_generation_interrupted_often_stays_within_one_budget(kind, times):
    engine = build_engine(kind)
    part = None
    for attempt in range(times):
        request = ask(prompt_of(5), attempt=attempt, prefix=part, **endless(40))
        target = 6 * (attempt + 1)
        task = asyncio.ensure_future(engine.generate(request))
        await until(lambda s, r=request, n=target: sampled(s, r) >= n, engine)
        await engine.abort(request.request_id)
        part = await task
        assert part.finish_reason == "abort" and target <= part.token_ids.size < 40
    got = await engine.generate(ask(prompt_of(5), attempt=times, prefix=part, **endless(40)))
    assert got.token_ids.size == got.logprobs.size == got.policy_versions.size == 40
    assert got.finish_reason == "length"
    assert got.token_ids[: part.token_ids.size].tolist() == part.token_ids.tolist()
    await engine.close()
