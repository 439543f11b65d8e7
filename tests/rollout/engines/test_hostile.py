"""What an engine makes of input that cannot be served and of calls that cross each other: a clear line, or a right result."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from headrace.errors import ModelError, PartFailed, RequestRefused, StaleTicket
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.types import NO_VERSION
from rollout.engines.engine_models import (
    END,
    VOCAB,
    ask,
    build_engine,
    endless,
    folder_of,
    forcing,
    prompt_of,
    publish,
    reference,
    sampled,
    until,
)

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["native", "hf"])
async def engine(request):
    made = build_engine(request.param)
    yield made
    await made.close()


async def goes_on(engine) -> None:
    """It serves the next request, and holds nothing of the last."""
    assert (await engine.generate(ask(prompt_of(4), "after", **endless(3)))).token_ids.size == 3
    stats = await engine.stats()
    assert stats.running == stats.waiting == stats.kv_tokens_used == 0


@pytest.mark.parametrize(
    ("sampling", "line"),
    [
        (dict(max_tokens=0), "max_tokens must be at least 1, found 0"),
        (dict(max_tokens=-3), "max_tokens"),
        (dict(min_tokens=-1), "min_tokens must be at least 0"),
        (dict(temperature=NAN), "temperature must be 0 or at least 0.001, found nan"),
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=1e-9), "temperature"),
        (dict(temperature=INF), "temperature"),
        (dict(top_p=0.0), "top_p must be above 0 and at most 1, found 0.0"),
        (dict(top_p=NAN), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(top_k=-1), "top_k must be at least 0"),
        (dict(min_p=NAN), "min_p"),
        (dict(min_p=1.1), "min_p"),
        (dict(repetition_penalty=0.0), "repetition_penalty must be above 0"),
        (dict(repetition_penalty=NAN), "repetition_penalty"),
        (dict(repetition_penalty=INF), "repetition_penalty"),
        (dict(stop=("x", "")), "empty string"),
        (dict(logit_bias=tuple((i, -INF) for i in range(VOCAB))), "logit_bias of token 0 must be finite, found -inf"),
        (dict(logit_bias=((4, NAN),)), "logit_bias of token 4"),
        (dict(logit_bias=((-2, 1.0),)), "names token -2"),
        (dict(stop_token_ids=(VOCAB,)), f"names token {VOCAB}"),
        (dict(allowed_token_ids=(5, VOCAB + 7)), f"names token {VOCAB + 7}"),
        (dict(allowed_token_ids=(END,), min_tokens=2), "end tokens only"),
        (dict(stop_token_ids=tuple(range(VOCAB)), min_tokens=1), "end tokens only"),
    ],
    ids=str,
)
async def test_sampling_that_cannot_be_is_refused_in_one_line(engine, sampling, line):
    with pytest.raises(RequestRefused, match=line) as refused:
        await engine.generate(ask(prompt_of(4), **sampling))
    assert "\n" not in str(refused.value)
    with pytest.raises(RequestRefused, match=line):
        async for _ in engine.stream(ask(prompt_of(4), "s", **sampling)):
            pass
    await goes_on(engine)


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ([], "no tokens"),
        ([0.5, 2.0], "whole numbers"),
        ([NAN], "whole numbers"),
        ([True, False], "whole numbers"),
        ([VOCAB], r"in \[0, 97\), found 97"),
        ([5, 1 << 40], "found 5 to 1099511627776"),
        ([5, 1 << 80], "whole numbers"),
        ([-1], "found -1"),
        ([5] * 100_000, "leaves no room in a context of 1024"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_prompt_that_cannot_be_is_refused_in_one_line(engine, prompt, line):
    request = replace(ask([5]), prompt_ids=np.array(prompt))
    with pytest.raises(RequestRefused, match=line):
        await engine.generate(request)
    await goes_on(engine)


@pytest.mark.parametrize("what", ["ids beyond", "negative", "lengths", "mask", "routes"])
async def test_a_prefix_that_does_not_fit_is_refused_and_fails_no_one_else(engine, what):
    options = dict(top_k=4, record_sampling_mask=True, **endless(8))
    other = asyncio.ensure_future(engine.generate(ask(prompt_of(5), "other", **endless(60))))
    good = await engine.generate(ask(prompt_of(4), "good", **options))
    part = replace(
        good, token_ids=good.token_ids[:4], logprobs=good.logprobs[:4], policy_versions=good.policy_versions[:4]
    )
    bad = {
        "ids beyond": replace(good, token_ids=good.token_ids + VOCAB),
        "negative": replace(good, token_ids=-1 - good.token_ids),
        "lengths": replace(part, logprobs=good.logprobs),
        "mask": part,  # whose mask is of all eight
        "routes": replace(good, expert_routing=np.zeros((3, 2, 2), np.uint8)),
    }[what]
    with pytest.raises(RequestRefused, match="its prefix"):
        await engine.generate(ask(prompt_of(4), "bad", attempt=1, prefix=bad, **options))
    assert (await other).token_ids.size == 60
    await goes_on(engine)


async def test_a_prefix_beyond_the_budget_or_the_context_ends_at_once(engine):
    whole = await engine.generate(ask(prompt_of(4), "w", **endless(30)))
    got = await engine.generate(ask(prompt_of(4), "r", prefix=whole, **endless(9)))
    assert got.finish_reason == "length" and got.token_ids.tolist() == whole.token_ids.tolist()
    long = ask(prompt_of(1010, 3), "l", prefix=whole, **endless(100))
    assert (await engine.generate(long)).finish_reason == "length"
    await goes_on(engine)


async def test_limits_that_mean_nothing_are_no_limits(engine):
    """More than there is: min_tokens above max_tokens, top_k above the vocabulary, every stop at once, no stop reached."""
    expected = await engine.generate(ask(prompt_of(4), "a", **endless(6)))
    for name, more in (("min", dict(min_tokens=10**9)), ("k", dict(top_k=10**9)), ("stop", dict(stop=("~" * 5000,)))):
        got = await engine.generate(ask(prompt_of(4), name, **{**endless(6), **more}))
        assert got.token_ids.tolist() == expected.token_ids.tolist() and got.finish_reason == "length"
    got = await engine.generate(ask(prompt_of(4), "ends", max_tokens=9, stop_token_ids=tuple(range(VOCAB))))
    assert got.token_ids.size == 1 and got.finish_reason == "stop"
    one = await engine.generate(ask(prompt_of(4), "one", max_tokens=4, min_tokens=4, allowed_token_ids=(5, 5, END)))
    assert one.token_ids.tolist() == [5] * 4 and one.logprobs.tolist() == [0.0] * 4
    huge = await engine.generate(ask(prompt_of(1000), "huge", **endless(10**12)))
    assert huge.token_ids.size == 24 and huge.finish_reason == "length"
    for seed in (-1, 0, 1 << 70):
        assert (await engine.generate(ask(prompt_of(4), f"seed{seed}", **endless(3), seed=seed))).token_ids.size == 3


async def test_extreme_temperatures_penalties_and_biases_stay_finite(engine):
    for name, sampling in (
        ("cold", dict(temperature=1e-3)),
        ("hot", dict(temperature=1e30)),
        ("bias", dict(logit_bias=tuple((i, -1e30) for i in range(VOCAB)))),
        ("one", dict(logit_bias=((9, 1e30),), top_p=1e-6)),
        ("penalty", dict(repetition_penalty=1e9)),
    ):
        got = await engine.generate(ask(prompt_of(4), name, **endless(5), **sampling))
        assert got.token_ids.size == 5 and np.isfinite(got.logprobs).all() and (got.logprobs <= 0).all()
        assert name != "one" or got.token_ids.tolist() == [9] * 5


# --------------------------------------------------------------------------------------------------- abort, everywhere


@pytest.mark.parametrize("state", ["waiting", "held back", "prefilling", "preempted", "frozen", "asleep", "weightless"])
@pytest.mark.parametrize("keep_kv", [False, True])
async def test_abort_works_in_every_state_and_what_it_hands_back_can_go_on(state, keep_kv):
    channel = InProcessChannel()
    tight = dict(preemption="save", kv_tokens=64) if state == "preempted" else {}
    engine = build_engine(channel=channel, prefill_tokens=16, max_running=1 if state == "waiting" else 8, **tight)
    await engine.commit(publish(channel, reference(), 1))
    request = ask(prompt_of(90 if state == "prefilling" else 10, 2), "cut", **endless(40))
    expected = await engine.generate(replace(request, key=replace(request.key, lease_id="whole")))
    engine.core.table.clear()
    others = []
    if state in ("waiting", "preempted"):
        others = [
            asyncio.ensure_future(engine.generate(ask(prompt_of(9, i), f"o{i}", **endless(40)))) for i in range(2)
        ]
        await until(lambda s: s.running == (1 if state == "waiting" else 2), engine)
    if state == "held back":
        await engine.pause("keep")
    task = asyncio.ensure_future(engine.generate(request))
    if state == "prefilling":
        while not engine.core.running or not 0 < engine.core.running[0].kv_length < 90:
            await asyncio.sleep(0)
    elif state == "preempted":
        await until(lambda s: any(one.saved for one in engine.core.waiting), engine)
        assert [one.request_id for one in engine.core.waiting] == [request.request_id]
    elif state in ("waiting", "held back"):
        await until(lambda s: request.request_id in s.progress, engine)
    else:
        await until(lambda s: sampled(s, request) >= 5, engine)
    if state == "frozen":
        await engine.pause("keep")
    elif state in ("asleep", "weightless"):
        await engine.sleep(1 if state == "asleep" else 2)
    returned = await engine.abort(request.request_id, keep_kv)
    part = await asyncio.wait_for(task, 10)
    assert part.finish_reason == "abort" and part.token_ids.tolist() == returned.token_ids.tolist()
    assert (part.kv_handle is not None) == (keep_kv and state in ("preempted", "frozen"))
    assert await engine.abort(request.request_id, keep_kv) is None
    await engine.resume()
    if state in ("asleep", "weightless"):
        await engine.wake()
        await engine.commit(publish(channel, reference(), 2))
    again = replace(request, key=replace(request.key, attempt=1), prefix=part, kv_handle=part.kv_handle)
    got = await asyncio.wait_for(engine.generate(again), 20)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    await asyncio.gather(*others)
    await goes_on(engine)
    assert engine.core.saves.bytes == 0
    await engine.close()


async def test_abort_of_a_stream_ends_it_and_two_aborts_at_once_give_one_generation():
    engine = build_engine(inline=False)
    request = ask(prompt_of(5), **endless(900))
    pieces = []

    async def read():
        async for piece in engine.stream(request):
            pieces.append(piece)

    task = asyncio.ensure_future(read())
    await until(lambda s: sampled(s, request) >= 3, engine)
    first, second = await asyncio.gather(engine.abort(request.request_id), engine.abort(request.request_id))
    await asyncio.wait_for(task, 10)
    assert second is None and pieces[-1].finish_reason == "abort"
    assert sum(piece.token_ids.size for piece in pieces) == first.token_ids.size
    await engine.close()


@pytest.mark.parametrize("inline", [True, False])
async def test_calls_that_cross_each_other_never_hang_and_lose_nothing(inline):
    """Requests, aborts, swaps, pauses and sleeps at random; every token is what its version forces, every request ends."""
    channel = InProcessChannel()
    engine = build_engine(channel=channel, inline=inline, kv_tokens=96, max_running=4, preemption="save", kv_saved_mb=1)
    model = reference()
    await engine.commit(channel.publish(forcing(model, 11), 1))
    rng, parts, done = np.random.default_rng(4), [], []

    async def one(i):
        part = None
        for attempt in count():
            request = ask(prompt_of(3 + i % 9, i % 3), f"r{i}", attempt=attempt, prefix=part, **endless(30))
            request = replace(request, kv_handle=part.kv_handle if part is not None else None, keep_kv=i % 2 == 0)
            task = asyncio.ensure_future(engine.generate(request))
            if attempt < 8 and rng.random() < 0.4:
                goal = (part.token_ids.size if part is not None else 0) + int(rng.integers(5))
                await until(lambda s, r=request, t=task, n=goal: t.done() or sampled(s, r) >= n, engine, 60)
                await engine.abort(request.request_id, bool(rng.integers(2)))
            part = await task
            if part.finish_reason != "abort":
                done.append(part)
                return
            parts.append(part)

    async def disturb():
        version = 1
        while True:
            # By what the engine did, not by a clock: a slow machine is no other test.
            made = (await engine.stats()).generated_tokens + int(rng.integers(1, 12))
            await until(lambda s, n=made: s.generated_tokens >= n or work.done(), engine, 60)
            what = int(rng.integers(5))
            if what <= 1:
                version += 1
                ticket = channel.publish(forcing(model, 10 + version % 60), version)
                running = ("go_on", "freeze", "abort")[version % 3]
                await asyncio.gather(engine.prepare(ticket), engine.commit(ticket, running))
                with pytest.raises(StaleTicket):
                    await engine.commit(replace(ticket, version=version - 1))
            elif what == 2:
                await engine.pause(("keep", "abort", "wait")[int(rng.integers(3))])
                await engine.resume()
            elif what == 3:
                await engine.sleep(1)
                await engine.wake()
            else:
                await engine.sleep(2)
                await engine.wake()
                version += 1
                await engine.commit(channel.publish(forcing(model, 10 + version % 60), version))

    work = asyncio.gather(*(one(i) for i in range(16)))
    noise = asyncio.ensure_future(disturb())
    await asyncio.wait_for(asyncio.wait([noise, work], return_when=asyncio.FIRST_COMPLETED), 100)
    assert work.done(), noise.exception()
    work.result()
    noise.cancel()
    await asyncio.wait([noise])
    await engine.resume()
    assert len(done) == 16 and len(parts) > 5
    for got in done:
        assert got.token_ids.size == 30
        assert [10 + v % 60 for v in got.policy_versions.tolist()] == got.token_ids.tolist()
    assert max(got.policy_versions.max() for got in done) > 3
    stats = await engine.stats()
    assert stats.running == stats.waiting == stats.kv_tokens_used == 0
    engine.core.table.clear()
    assert not any(engine.core.table.counts)
    await engine.close()


async def test_waiting_for_an_engine_to_run_dry_ends_when_it_is_closed_or_fails():
    for failing in (False, True):
        engine = build_engine(inline=False)
        task = asyncio.ensure_future(engine.generate(ask(prompt_of(5), **endless(900))))
        await until(lambda s: s.progress, engine)
        drained = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0.01)
        if failing:
            engine.core.advance = lambda: 1 / 0
        else:
            await engine.close()
        await asyncio.wait_for(asyncio.wait([drained]), 10)
        with pytest.raises(PartFailed):
            await task
        await engine.close()


async def test_sleep_levels_that_are_none_are_refused(engine):
    for level in (0, 3, -1):
        with pytest.raises(PartFailed, match=f"found {level}"):
            await engine.sleep(level)
    await goes_on(engine)


def test_a_cache_beyond_all_memory_is_refused_before_it_is_made():
    with pytest.raises(
        ModelError, match=r"rollout\.engine\.kv_tokens: keys and values of 1000000000000 tokens take .* GB"
    ):
        build_engine(kv_tokens=10**12)


async def test_one_block_is_enough_for_what_fits_into_it():
    engine = build_engine(kv_tokens=4)
    got = await asyncio.wait_for(
        asyncio.gather(*(engine.generate(ask(prompt_of(2, i), f"b{i}", **endless(9))) for i in range(5))), 20
    )
    assert [one.token_ids.size for one in got] == [2] * 5
    with pytest.raises(RequestRefused, match="kv_tokens"):
        await engine.generate(ask(prompt_of(4)))
    await engine.close()


async def test_keys_and_values_of_another_model_are_not_taken(tmp_path):
    one = build_engine(folder=folder_of("llama"), kv_folder=str(tmp_path))
    other = build_engine(folder=folder_of("qwen3"), kv_folder=str(tmp_path))
    request = ask(prompt_of(10), "cut", **endless(30))
    task = asyncio.ensure_future(one.generate(request))
    await until(lambda s: sampled(s, request) >= 5, one)
    part = await one.abort(request.request_id, keep_kv=True)
    await task
    again = ask(prompt_of(10), "cut", attempt=1, prefix=part, kv_handle=part.kv_handle, **endless(30))
    theirs = await other.generate(again)
    plain = await other.generate(replace(again, key=replace(again.key, attempt=2), kv_handle=None))
    assert theirs.token_ids.tolist() == plain.token_ids.tolist()
    # And it is still there for the one that it belongs to.
    before = (await one.stats()).recomputed_tokens
    assert (await one.generate(again)).token_ids.size == 30 and (await one.stats()).recomputed_tokens == before
    await one.close()
    await other.close()


def _without(tensors):
    del tensors["model.layers.1.mlp.down_proj.weight"]


def _with_more(tensors):
    tensors["model.layers.9.mlp.down_proj.weight"] = tensors["model.norm.weight"]


def _shorter(tensors):
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1]


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without, r"missing \['model\.layers\.1\.mlp\.down_proj"),
        (_with_more, r"unknown \['model\.layers\.9"),
        (_shorter, "k_proj.weight has shape"),
    ],
)
async def test_weights_of_another_shape_are_refused_before_anything_reads_them(family, spoil, said):
    channel = InProcessChannel()
    engine = build_engine(folder=folder_of(family), channel=channel)
    tensors = dict(reference(family, seed=3).state_dict())
    spoil(tensors)
    with pytest.raises(ModelError, match=said):
        await engine.prepare(channel.publish(list(tensors.items()), 1))
    got = await engine.generate(ask(prompt_of(5), "a", **endless(6)))
    assert set(got.policy_versions.tolist()) == {NO_VERSION} and np.isfinite(got.logprobs).all()
    await engine.close()


@pytest.mark.parametrize("inline", [True, False])
async def test_an_engine_that_failed_says_so_to_whoever_looks(inline):
    """The dispatcher looks at every engine; one that answers as if nothing had happened would never be replaced."""
    engine = build_engine(inline=inline)

    def broken():
        raise OverflowError("this pass")

    engine.core.step = broken
    with pytest.raises(PartFailed, match="this pass"):
        await engine.generate(ask(prompt_of(4)))
    with pytest.raises(PartFailed, match="this pass"):
        await engine.stats()
    await engine.close()
