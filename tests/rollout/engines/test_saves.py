"""A generation that was handed back with its keys and values: continued bit for bit, here or elsewhere, or from its prefix."""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.exchange.channels.in_process import InProcessChannel
from headrace.rollout.engines.native.saves import Saved, Saves
from rollout.engines.engine_models import (
    ask,
    build_engine,
    build_model,
    endless,
    folder_of,
    plain_logprobs,
    prompt_of,
    publish,
    sampled,
    until,
)

COUNT = 40


async def cut(engine, request, at=7):
    """The request's generation after `at` tokens or a few more, with a handle."""
    task = asyncio.ensure_future(engine.generate(request))
    await until(lambda s: sampled(s, request) >= at, engine)
    await engine.abort(request.request_id, keep_kv=True)
    return await task


def again(part, **more):
    """The same generation, from what was handed back."""
    return ask(prompt_of(10), "cut", attempt=1, prefix=part, kv_handle=part.kv_handle, **{**endless(COUNT), **more})


def computed(stats) -> int:
    """Prompt tokens that went through a pass."""
    return stats.prompt_tokens - stats.cached_prompt_tokens


@pytest.mark.parametrize("options", [dict(), dict(disk=True), dict(folder="gemma3"), dict(dtype="bfloat16", disk=True)])
async def test_a_kept_generation_goes_on_bit_for_bit(options, tmp_path):
    folder = folder_of(options.get("folder", "llama"))
    engine = build_engine(
        folder=folder, dtype=options.get("dtype", "float32"), kv_folder=str(tmp_path) if options.get("disk") else ""
    )
    whole = await engine.generate(ask(prompt_of(10), "whole", **endless(COUNT)))
    part = await cut(engine, ask(prompt_of(10), "cut", **endless(COUNT)))
    engine.core.table.clear()
    before = await engine.stats()
    assert part.kv_handle and 7 <= part.token_ids.size < COUNT
    assert before.kv_tokens_used == 0 and len(list(tmp_path.iterdir())) == ("disk" in options)
    got = await engine.generate(again(part))
    assert got.token_ids.tolist() == whole.token_ids.tolist() and got.logprobs.tolist() == whole.logprobs.tolist()
    after = await engine.stats()
    assert computed(after) == computed(before) and after.recomputed_tokens == 0
    assert engine.core.saves.bytes == 0 and not list(tmp_path.iterdir())
    await engine.close()


@pytest.mark.parametrize("how", ["cleared", "used twice", "torn", "another model", "no path out", "too little room"])
async def test_a_handle_that_is_gone_falls_back_to_the_prefix(how, tmp_path):
    options = dict(kv_folder=str(tmp_path), kv_saved_mb=0 if how == "too little room" else 1)
    engine = build_engine(**options)
    whole = await engine.generate(ask(prompt_of(10), "whole", **endless(COUNT)))
    part = await cut(engine, ask(prompt_of(10), "cut", **endless(COUNT)))
    engine.core.table.clear()
    if how == "cleared":
        engine.core.saves.clear()
    elif how == "used twice":
        await engine.generate(again(part))
        engine.core.table.clear()
    elif how == "torn":
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "another model":
        engine.core.saves.model = "other"
    elif how == "no path out":
        (file,) = tmp_path.iterdir()
        outside = tmp_path.parent / file.name
        file.rename(outside)
        part = replace(part, kv_handle=f"disk:../{outside.stem}")
    before = await engine.stats()
    got = await engine.generate(again(part))
    assert got.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(got.logprobs, whole.logprobs, atol=1e-5)
    assert computed(await engine.stats()) > computed(before)
    await engine.close()


async def test_a_handle_of_other_tokens_is_not_taken():
    engine = build_engine()
    part = await cut(engine, ask(prompt_of(10), "cut", **endless(COUNT)))
    other = ask(prompt_of(12, 3), "other", kv_handle=part.kv_handle, **endless(9))
    got = await engine.generate(other)
    alone = build_engine()
    expected = await alone.generate(ask(prompt_of(12, 3), "other", **endless(9)))
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    await engine.close()
    await alone.close()


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
@pytest.mark.parametrize("by", ["abort", "commit"])
async def test_over_a_swap_it_is_as_if_it_had_never_been_interrupted(kv_on_swap, by):
    """With the same seed and swap point; the older keys and values stay or go by the engine's rule."""
    other = build_model("llama", seed=9)

    async def go(interrupt):
        channel = InProcessChannel()
        engine = build_engine(channel=channel, kv_on_swap=kv_on_swap)
        request = replace(ask(prompt_of(10), "cut", **endless(COUNT)), keep_kv=by == "commit")
        task = asyncio.ensure_future(engine.generate(request))
        await until(lambda s: sampled(s, request) >= 7, engine)
        if interrupt and by == "abort":
            await engine.abort(request.request_id, keep_kv=True)
        await engine.commit(publish(channel, other, 1), "abort" if interrupt else "go_on")
        if interrupt:
            part = await task
            assert part.kv_handle and set(part.policy_versions.tolist()) == {-1}
            task = asyncio.ensure_future(engine.generate(again(part)))
        got = await task
        await engine.close()
        return got

    a, b = await go(True), await go(False)
    assert a.token_ids.tolist() == b.token_ids.tolist() and a.policy_versions.tolist() == b.policy_versions.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=0 if kv_on_swap == "keep" else 1e-5)
    new = a.policy_versions == 1
    gap = np.abs(a.logprobs - plain_logprobs(other, again(a), a))[new].max()
    assert (gap < 1e-4) == (kv_on_swap == "recompute")


async def test_what_older_weights_made_is_shared_with_nobody():
    channel, other = InProcessChannel(), build_model("llama", seed=9)
    engine = build_engine(channel=channel)
    part = await cut(engine, ask(prompt_of(10), "cut", **endless(COUNT)))
    await engine.commit(publish(channel, other, 1))
    await engine.generate(again(part))
    sibling = ask(prompt_of(10), "sibling", **endless(5))
    got = await engine.generate(sibling)
    np.testing.assert_allclose(got.logprobs, plain_logprobs(other, sibling, got), atol=1e-4)
    await engine.close()


async def test_saves_outlive_sleep():
    engine = build_engine()
    whole = await engine.generate(ask(prompt_of(10), "whole", **endless(COUNT)))
    part = await cut(engine, ask(prompt_of(10), "cut", **endless(COUNT)))
    await engine.sleep(1)
    await engine.wake()
    before = await engine.stats()
    got = await engine.generate(again(part))
    assert got.logprobs.tolist() == whole.logprobs.tolist() and computed(await engine.stats()) == computed(before)
    await engine.close()


def continue_elsewhere(folder, kv_folder, part, pipe):
    async def go():
        engine = build_engine(folder=folder, kv_folder=kv_folder)
        got = await engine.generate(again(part))
        pipe.send((got, computed(await engine.stats())))
        await engine.close()

    asyncio.run(go())


async def test_another_process_goes_on_bit_for_bit(tmp_path):
    engine = build_engine(kv_folder=str(tmp_path))
    whole = await engine.generate(ask(prompt_of(10), "whole", **endless(COUNT)))
    part = await cut(engine, ask(prompt_of(10), "cut", **endless(COUNT)))
    await engine.close()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=continue_elsewhere, args=(folder_of(), str(tmp_path), part, theirs)
    )
    process.start()
    assert await asyncio.to_thread(ours.poll, 60)
    got, passed = ours.recv()
    process.join()
    assert passed == 0
    assert got.token_ids.tolist() == whole.token_ids.tolist() and got.logprobs.tolist() == whole.logprobs.tolist()


def test_the_oldest_go_when_there_is_no_room_for_more(tmp_path):
    def saved(length):
        return Saved(list(range(length)), 0, True, {0: (torch.zeros(length, 1, 1), torch.ones(length, 1, 1))})

    for folder in ("", str(tmp_path)):
        saves = Saves("engine-0", "model", 8 * 100, folder)
        first, second, third = (saves.put(saved(40)) for _ in range(3))
        assert saves.bytes == 8 * 80 and saves.take(first) is None
        assert saves.take(second).ids == saves.take(third).ids == list(range(40))
        assert saves.bytes == 0 and saves.put(saved(101)) is None
    assert not list(tmp_path.iterdir())
