"""A generation that was handed back with its keys and values: continued bit for bit, here or elsewhere, or from its prefix."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.errors import ModelError
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
    assert before.kv_tokens_used == 0 and len(list(tmp_path.glob("*.safetensors"))) == ("disk" in options)
    got = await engine.generate(again(part))
    assert got.token_ids.tolist() == whole.token_ids.tolist() and got.logprobs.tolist() == whole.logprobs.tolist()
    after = await engine.stats()
    assert computed(after) == computed(before) and after.recomputed_tokens == 0
    assert engine.core.saves.bytes == 0 and not list(tmp_path.glob("*.safetensors"))
    await engine.close()


async def test_with_fixed_shapes_it_goes_on_bit_for_bit_among_others(tmp_path):
    """Cut in a crowd, continued in a crowd of another engine, against a generation that was alone and never cut."""

    def fixed():
        return build_engine(deterministic=True, kv_folder=str(tmp_path), max_running=6)

    def crowd(engine, seed):
        return [
            asyncio.ensure_future(engine.generate(ask(prompt_of(5 + i, seed + i), f"c{seed + i}", **endless(25))))
            for i in range(4)
        ]

    alone, one, other = fixed(), fixed(), fixed()
    whole = await alone.generate(ask(prompt_of(10), "whole", **endless(COUNT)))
    company = crowd(one, 0)
    part = await cut(one, ask(prompt_of(10), "cut", **endless(COUNT)))
    company += crowd(other, 10)
    got = await other.generate(again(part))
    stats = await other.stats()
    assert part.kv_handle and stats.recomputed_tokens == 0
    assert got.token_ids.tolist() == whole.token_ids.tolist() and got.logprobs.tolist() == whole.logprobs.tolist()
    await asyncio.gather(*company)
    for engine in (alone, one, other):
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
        (file,) = tmp_path.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "another model":
        engine.core.saves.model = "other"
    elif how == "no path out":
        (file,) = tmp_path.glob("*.safetensors")
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
    assert await asyncio.to_thread(ours.poll, 180)
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
        ids = list(range(40))
        assert saves.bytes == 8 * 80 and saves.take(first, ids) is None
        assert saves.take(second, ids[:-1]) is None  # other tokens: it stays for whom it is meant
        assert saves.take(second, ids).ids == saves.take(third, ids).ids == ids
        assert saves.bytes == 0 and saves.put(saved(101)) is None
    assert not files_in(tmp_path)


def files_in(folder):
    return sorted(path for path in folder.iterdir() if not path.name.endswith(".lock"))


def some_save(length=40):
    return Saved(list(range(length)), 0, True, {0: (torch.zeros(length, 1, 1), torch.ones(length, 1, 1))})


def test_what_dead_engines_left_is_bounded_and_then_deleted_and_what_living_ones_hold_is_left_alone(tmp_path):
    ids = list(range(40))
    dead, living = Saves("engine-0", "model", 1000, str(tmp_path)), Saves("engine-1", "model", 1000, str(tmp_path))
    old, kept, fresh = dead.put(some_save()), living.put(some_save()), dead.put(some_save())
    (tmp_path / f".{dead._owner}ffff.part").write_bytes(b"torn")
    an_age_ago = time.time() - 2 * 3600
    os.utime(dead._path(old), (an_age_ago, an_age_ago))
    os.utime(living._path(kept), (an_age_ago, an_age_ago))
    dead._alive.close()  # as its process's end does
    heir = Saves("engine-0", "model", 1000, str(tmp_path))
    assert {path.stem for path in files_in(tmp_path)} == {kept.removeprefix("disk:"), fresh.removeprefix("disk:")}
    assert heir.bytes > 0 and len(list(tmp_path.glob(".*.lock"))) == 2
    assert heir.take(fresh, ids).ids == ids and heir.bytes == 0  # it can still be taken up
    assert living.take(kept, ids).ids == ids
    fresh = heir.put(some_save())
    heir._alive.close()
    small = Saves("engine-0", "model", 100, str(tmp_path))
    assert small.bytes == 0 and not files_in(tmp_path)


def test_a_handle_of_an_earlier_process_names_nothing_of_a_later_one():
    first, second = (Saves("engine-0", "model", 1000) for _ in range(2))
    handle, other = first.put(some_save()), second.put(some_save())
    assert handle.startswith("engine-0:") and handle != other
    assert second.take(handle, list(range(40))) is None


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"rollout\.engine\.kv_folder: .*file.* cannot be used"):
        build_engine(kv_folder=str(tmp_path / "file"))


@pytest.mark.parametrize("how", ["full", "gone"])
async def test_a_disk_that_takes_no_more_costs_a_recomputation_and_nothing_else(how, tmp_path):
    """Preempted in little memory, and handed back, with nowhere to put keys and values."""
    folder = tmp_path / "kv"
    engine = build_engine(kv_folder=str(folder), preemption="save", kv_tokens=64)
    requests = [ask(prompt_of(6 + i, i), f"r{i}", **endless(20)) for i in range(6)]
    free = build_engine()
    expected = await asyncio.gather(*map(free.generate, requests))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "gone":
        shutil.rmtree(folder)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        got = await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 60)
        part = await cut(engine, ask(prompt_of(10), "cut", **endless(COUNT)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [one.token_ids.tolist() for one in got] == [one.token_ids.tolist() for one in expected]
    stats = await engine.stats()
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0 and engine.core.saves.failed > 0
    assert part.kv_handle is None and part.token_ids.size >= 7
    assert how == "gone" or not files_in(folder)
    await engine.close()
    await free.close()
