"""The scripted engine's clock against hand-computed moments: processor sharing, prefill, swaps as runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.protocols import WorkerContext
from headrace.rollout.engines.scripted import ScriptedCosts, ScriptedEngine
from headrace.types import GenerateRequest, RequestKey, SamplingParams, WeightTicket

COSTS = dict(token_s=1.0, token_s_each=0.5, prefill_s=0.0, prepare_s=0.0, commit_s=0.0, length=1e9, length_sigma=0.0)


def ask(name: str, tokens: int, prefix=None) -> GenerateRequest:
    return GenerateRequest(
        key=RequestKey(lease_id=name),
        group_id=name.partition(".")[0],
        prompt_ids=np.array([1, 2]),
        sampling=SamplingParams(max_tokens=tokens, seed=3),
        prefix=prefix,
    )


def ticket(version: int) -> WeightTicket:
    return WeightTicket(policy="main", version=version, scope="full", locator="", checksum="")


def run(story, **costs):
    async def main():
        engine = ScriptedEngine(
            WorkerContext(name="engine-0", record=lambda event: None), ScriptedCosts(**(COSTS | costs))
        )
        await engine.commit(ticket(0))
        return await story(engine, asyncio.get_running_loop().time)

    return run_simulated(main())


def test_requests_share_the_engine_and_a_later_one_slows_the_earlier_down():
    """a (4 tokens) has 2 when b (2) and c (3) come, at 2 s; a step of three takes 2 s, so a and b end at 6 s."""

    async def story(engine, clock):
        ends = {}

        async def one(name, tokens, after):
            await asyncio.sleep(after)
            await engine.generate(ask(name, tokens))
            ends[name] = clock()

        await asyncio.gather(one("a", 4, 0.0), one("b", 2, 2.0), one("c", 3, 2.0))
        return ends

    # c is alone for its last token.
    assert run(story) == {"a": 6.0, "b": 6.0, "c": 7.0}


def test_no_timer_per_token():
    async def story(engine, clock):
        before = asyncio.get_running_loop()._timer_count
        await engine.generate(ask("a", 100_000))
        return clock(), asyncio.get_running_loop()._timer_count - before

    assert run(story) == (100_000.0, 1)


def test_a_swap_splits_the_versions_where_the_token_was_due():
    async def story(engine, clock):
        task = asyncio.ensure_future(engine.generate(ask("a", 5)))
        await asyncio.sleep(2.5)
        await engine.commit(ticket(1))
        await asyncio.sleep(2.0)
        await engine.commit(ticket(3))
        return (await task).policy_versions.tolist()

    assert run(story) == [0, 0, 1, 1, 3]


def test_a_frozen_engine_stands_still():
    async def story(engine, clock):
        task = asyncio.ensure_future(engine.generate(ask("a", 4)))
        await asyncio.sleep(1.5)
        await engine.pause("keep")
        await asyncio.sleep(10.0)
        await engine.resume()
        await task
        return clock()

    assert run(story) == 14.0


def test_a_cut_generation_goes_on_where_it_stopped_and_draws_the_same_tokens():
    async def story(engine, clock):
        whole = await engine.generate(ask("whole", 6))
        task = asyncio.ensure_future(engine.generate(ask("a", 6)))
        await asyncio.sleep(2.5)
        partial = await engine.abort(str(RequestKey(lease_id="a")))
        assert (await task).finish_reason == "abort"
        await engine.commit(ticket(1))
        rest = await engine.generate(ask("a", 6, partial))
        return whole, partial, rest, clock()

    whole, partial, rest, seconds = run(story)
    assert partial.token_ids.tolist() == whole.token_ids[:2].tolist()
    assert rest.token_ids.tolist() == whole.token_ids.tolist()
    assert rest.policy_versions.tolist() == [0, 0, 1, 1, 1, 1]
    assert seconds == 6 + 2.5 + 4


def test_a_cut_generation_that_another_lease_goes_on_with_stays_the_same_answer():
    async def story(engine, clock):
        whole = await engine.generate(ask("whole", 50))
        task = asyncio.ensure_future(engine.generate(ask("a", 50)))
        await asyncio.sleep(len(whole.token_ids) - 0.5)
        partial = await engine.abort(str(RequestKey(lease_id="a")))
        await task
        again = ask("b", 50, partial)
        return whole, await engine.generate(replace(again, sampling=replace(again.sampling, seed=4)))

    whole, rest = run(story, length=10.0, length_sigma=0.3)
    assert rest.token_ids.tolist() == whole.token_ids.tolist() and rest.finish_reason == "stop"


def test_siblings_share_one_prefill_during_which_nothing_is_decoded():
    async def story(engine, clock):
        ends = {}

        async def one(name, after):
            await asyncio.sleep(after)
            await engine.generate(ask(name, 2))
            ends[name] = clock()

        await asyncio.gather(one("g.a", 0), one("g.b", 0), one("h", 1))
        return ends

    # g's prompt until 4 s, h's until 8 s; then three decode with 2 s a step.
    assert run(story, prefill_s=4.0) == {"g.a": 12.0, "g.b": 12.0, "h": 12.0}


def test_a_full_engine_lets_the_next_one_in_when_a_place_is_free():
    async def story(engine, clock):
        ends = {}

        async def one(name, tokens):
            await engine.generate(ask(name, tokens))
            ends[name] = clock()

        await asyncio.gather(one("a", 2), one("b", 4), one("c", 1))
        return ends

    # a and b share until 3 s; c takes a's place for one step of 1.5 s; b is alone for its last token.
    assert run(story, max_running=2) == {"a": 3.0, "c": 4.5, "b": 5.5}


def test_one_token_of_work_overtakes_63_long_requests_within_a_token_of_each():
    async def story(engine, clock):
        long = [asyncio.ensure_future(engine.generate(ask(f"l{i}", 900))) for i in range(63)]
        await asyncio.sleep(100.0)  # a step of 63 takes 32 s
        short = await engine.generate(ask("short", 1))
        took = clock() - 100.0
        assert short.token_ids.size == 1 and not any(one.done() for one in long)
        await engine.pause("abort")
        return took, {one.token_ids.size for one in await asyncio.gather(*long)}

    took, lengths = run(story, max_running=64)
    # One step of 64 takes 32.5 s. The others had 3 tokens and a part of one by then, and get one more.
    assert took == 32.5 and lengths == {4}


def test_some_answers_run_away_to_the_limit():
    async def story(engine, clock):
        lengths = []
        for seed in range(200):
            request = ask("a", 1000)
            lengths.append(engine._length(GenerateRequest(
                key=request.key, group_id="a", prompt_ids=request.prompt_ids, sampling=SamplingParams(max_tokens=1000, seed=seed)
            )))  # fmt: skip
        return lengths

    lengths = run(story, length=50.0, length_sigma=0.5, runaway=0.1)
    assert 5 <= lengths.count(1000) <= 40 and 40 < sorted(lengths)[100] < 65
