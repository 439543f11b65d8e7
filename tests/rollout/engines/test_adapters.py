"""Base and adapter, unmerged, compute what the merged model does; several versions of it share a pass; nothing piles up."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import numpy as np
import psutil
import pytest

from headrace.errors import ModelError, PartFailed
from headrace.exchange.channels.filesystem import FilesystemChannel
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.rollout.engines.native.adapters import AdaptedWeights
from rollout.engines.adapter_models import merged, publish_adapter, random_adapter
from rollout.engines.engine_models import (
    ask,
    build_engine,
    endless,
    folder_of,
    plain_logprobs,
    prompt_of,
    publish,
    reference,
    sampled,
    until,
)

ALL_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3", "phi3")


class Bench:
    """An engine, its channel, and for each version the model that it stands for."""

    def __init__(self, family="llama", channel=None, **engine) -> None:
        self.base, self.models = reference(family), {}
        self.channel = channel if channel is not None else InProcessChannel()
        self.engine = build_engine(folder=folder_of(family), channel=self.channel, **engine)
        self.rows: list[int] = []

    def publish(self, version: int, **adapter):
        factors = random_adapter(self.base, version, **adapter)
        self.models[version] = merged(self.base, factors)
        return publish_adapter(self.channel, factors, version)

    async def live(self, version: int, **adapter) -> None:
        await self.engine.commit(self.publish(version, **adapter))

    def count_versions(self) -> list[int]:
        """From now on: how many adapters each pass ran."""
        weights, counts = self.engine.core.weights.base.rows, []
        begin = weights.begin

        def counting(batch, live):
            begin(batch, live)
            counts.append(len(weights._all))

        weights.begin = counting
        return counts

    def start(self, name, count=24, prompt=6, **more):
        request = ask(prompt_of(prompt, seed=len(name)), name, **endless(count, **more))
        return request, asyncio.ensure_future(self.engine.generate(request))

    async def until_sampled(self, request, count):
        await until(lambda stats: sampled(stats, request) >= count, self.engine)

    def check(self, request, got, version: int, part=slice(None)) -> None:
        """The tokens are stamped with the version and have its model's log-probabilities."""
        assert set(got.policy_versions[part].tolist()) == {version}
        expected = plain_logprobs(self.models[version], request, got)
        np.testing.assert_allclose(got.logprobs[part], expected[part], atol=1e-4)


@pytest.mark.parametrize("family", ALL_FAMILIES)
async def test_base_and_adapter_compute_what_the_merged_model_does(family):
    bench = Bench(family)
    for version in (1, 2, 3):
        await bench.live(version)
        requests = [ask(prompt_of(n, n), f"{version}.{n}", member=m, **endless(9)) for n in (2, 7, 21) for m in (0, 1)]
        for request, got in zip(requests, await asyncio.gather(*map(bench.engine.generate, requests)), strict=True):
            bench.check(request, got, version)
    await bench.engine.close()


@pytest.mark.parametrize("only", [("q_proj", "v_proj"), ("v_proj",), ("up_proj", "down_proj"), ("k_proj", "gate_proj")])
async def test_some_layers_of_a_fused_product_may_go_without(only):
    bench = Bench("qwen2")
    await bench.live(1, only=only)
    request, task = bench.start("a")
    bench.check(request, await task, 1)
    await bench.engine.close()


@pytest.mark.parametrize("engine", [dict(deterministic=True), dict(inline=False), dict(dtype="bfloat16")], ids=str)
async def test_in_fixed_shapes_in_a_thread_and_in_bfloat16(engine):
    bench = Bench(**engine)
    await bench.live(1)
    request, task = bench.start("a")
    got = await task
    if engine.get("dtype"):
        assert np.abs(got.logprobs - plain_logprobs(bench.models[1], request, got)).mean() < 0.3
    else:
        bench.check(request, got, 1)
    await bench.engine.close()


@pytest.mark.parametrize("family", ["llama", "gemma"])
async def test_what_runs_finishes_on_its_adapter_beside_what_comes_after(family):
    bench = Bench(family, kv_on_swap="finish")
    await bench.live(1)
    old = [bench.start(f"old{i}", 30 + i, prompt=5 + i) for i in range(3)]
    await bench.until_sampled(old[-1][0], 4)
    await bench.live(2)
    counts = bench.count_versions()
    new = [bench.start(f"newer{i}", 20, prompt=5 + i) for i in range(3)]
    await bench.until_sampled(new[-1][0], 4)
    await bench.live(3)
    newest = [bench.start(f"new{i}est", 12, prompt=30) for i in range(2)]
    for version, started in ((1, old), (2, new), (3, newest)):
        for request, task in started:
            bench.check(request, await task, version)
    assert {2, 3} <= set(counts), "passes ran two and three versions together"
    await bench.engine.close()


async def test_another_base_ends_what_was_to_finish_on_an_adapter():
    bench = Bench(kv_on_swap="finish")
    await bench.live(1)
    request, task = bench.start("a", 30)
    await bench.until_sampled(request, 5)
    await bench.engine.commit(publish(bench.channel, reference("llama", seed=7), 2))
    got = await task
    first = got.policy_versions.tolist().count(1)
    assert 5 <= first < 30 and got.policy_versions.tolist() == [1] * first + [2] * (30 - first)
    await bench.engine.close()


async def test_with_keep_and_recompute_a_generation_goes_on_under_the_new_adapter():
    for rule in ("keep", "recompute"):
        bench = Bench(kv_on_swap=rule)
        await bench.live(1)
        request, task = bench.start("a", 30)
        await bench.until_sampled(request, 5)
        await bench.live(2)
        counts = bench.count_versions()
        got = await task
        first = got.policy_versions.tolist().count(1)
        assert 5 <= first < 30 and got.policy_versions.tolist() == [1] * first + [2] * (30 - first)
        expected = plain_logprobs(bench.models[2], request, got)[first:]
        off = np.abs(got.logprobs[first:] - expected).max()
        assert off < 1e-4 if rule == "recompute" else off > 1e-3, "older keys and values are there, or are not"
        assert set(counts) == {1}
        await bench.engine.close()


async def test_no_more_adapters_run_together_than_may():
    bench = Bench(kv_on_swap="finish", max_adapters=2)
    await bench.live(1)
    first = bench.start("first", 60)
    await bench.until_sampled(first[0], 3)
    await bench.live(2)
    counts = bench.count_versions()
    second = bench.start("second", 60)
    await bench.until_sampled(second[0], 3)
    await bench.live(3)
    third = bench.start("third", 20)
    got = await first[1]
    # Its adapter went when the third came, and it never ran under the second.
    assert sorted(set(got.policy_versions.tolist())) == [1, 3] and (np.diff(got.policy_versions) >= 0).all()
    bench.check(first[0], got, 1, slice(0, got.policy_versions.tolist().count(1)))
    bench.check(second[0], await second[1], 2)
    bench.check(third[0], await third[1], 3)
    assert max(counts) == 2
    await bench.engine.close()


@pytest.mark.parametrize("kv_on_swap", ["keep", "finish"])
async def test_a_stream_of_adapters_to_an_engine_that_is_slow_leaves_the_newest_and_nothing_else(kv_on_swap):
    """Several come while one pass is made: a staged one gives way to the next, and what runs is none the worse."""
    bench = Bench(kv_on_swap=kv_on_swap)
    await bench.live(1)
    request, running = bench.start("slow", 40)
    await bench.until_sampled(request, 3)
    step = bench.engine.core.step

    def slow_step():
        time.sleep(0.02)
        return step()

    bench.engine.core.step = slow_step
    alive: weakref.WeakSet[AdaptedWeights] = weakref.WeakSet()
    for version in range(2, 42):
        ticket = bench.publish(version)
        await bench.engine.prepare(ticket)
        alive.add(bench.engine.core.staged[1])
        if version % 10 == 1:
            await bench.engine.commit(ticket)
    gc.collect()
    assert bench.engine.core.version == 41 and len(alive) <= 5, "live, and what still runs under its own"
    got = await running
    seen = set(got.policy_versions.tolist())
    assert seen == {1} if kv_on_swap == "finish" else seen <= {1, 11, 21, 31, 41}
    bench.check(request, got, 1, slice(0, got.policy_versions.tolist().count(1)))
    await bench.engine.close()


@pytest.mark.parametrize("preemption", ["recompute", "save"])
async def test_preemption_never_mixes_an_adapter_with_others_keys(preemption):
    """With its keys and values saved a generation finishes on its adapter; without, it is computed anew under the live one."""
    bench = Bench(kv_on_swap="finish", kv_tokens=64, preemption=preemption)
    await bench.live(1)
    old = [bench.start(f"old{i}", 26, prompt=4 + i) for i in range(3)]
    for request, _ in old:
        await bench.until_sampled(request, 2)
    await bench.live(2)
    done = [(request, await task) for request, task in old]
    assert (await bench.engine.stats()).preemptions > 0
    for request, got in done:
        switch = got.policy_versions.tolist().count(1)
        assert (np.diff(got.policy_versions) >= 0).all()
        bench.check(request, got, 1, slice(0, switch))
        if switch < 26:
            bench.check(request, got, 2, slice(switch, None))
    switched = sum((got.policy_versions == 2).any() for _, got in done)
    assert switched == 0 if preemption == "save" else switched > 0
    await bench.engine.close()


async def test_a_prompt_that_an_older_adapter_computed_is_computed_anew():
    bench = Bench(kv_on_swap="finish")
    await bench.live(1)
    prompt = prompt_of(40)
    held = ask(prompt, "old", **endless(40))
    task = asyncio.ensure_future(bench.engine.generate(held))
    await bench.until_sampled(held, 3)
    await bench.live(2)
    sibling = ask(prompt, "new", **endless(6))
    bench.check(sibling, await bench.engine.generate(sibling), 2)
    bench.check(held, await task, 1)
    await bench.engine.close()


async def test_a_sleeper_without_weights_reads_its_base_again():
    bench = Bench()
    await bench.live(1)
    await bench.engine.sleep(2)
    await bench.engine.wake()
    assert bench.engine.core.weights is None
    await bench.live(2)
    request, task = bench.start("a")
    bench.check(request, await task, 2)
    await bench.engine.close()


@pytest.mark.parametrize("family", ["llama", "gemma"])
async def test_whole_weights_between_two_adapters_leave_the_base_as_it_was(family):
    bench = Bench(family)
    await bench.live(1)
    bench.models[2] = reference(family, 5)
    await bench.engine.commit(publish(bench.channel, bench.models[2], 2))
    bench.models[3] = reference(family, 6)
    await bench.engine.commit(publish(bench.channel, bench.models[3], 3))
    request, task = bench.start("whole")
    bench.check(request, await task, 3)
    await bench.live(4)
    request, task = bench.start("adapter")
    bench.check(request, await task, 4)
    await bench.engine.close()


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda f: {**f, "model.layers.9.mlp.up_proj.lora_A": f["model.layers.0.mlp.up_proj.lora_A"]}, "no layer for"),
        (lambda f: {n: t for n, t in f.items() if n != "model.layers.0.mlp.up_proj.lora_B"}, "no layer for"),
        (lambda f: {n: t[:, :-1] if n.endswith("0.mlp.up_proj.lora_A") else t for n, t in f.items()}, "has factors"),
        (lambda f: {n: t[:-1] if n.endswith("0.mlp.up_proj.lora_B") else t for n, t in f.items()}, "has factors"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_goes_on(spoil, word):
    bench = Bench()
    await bench.live(1)
    with pytest.raises(ModelError, match=word):
        await bench.engine.prepare(publish_adapter(bench.channel, spoil(random_adapter(bench.base, 2)), 2))
    request, task = bench.start("a")
    bench.check(request, await task, 1)
    await bench.engine.close()


async def test_an_engine_without_adapters_says_what_to_do():
    bench = Bench(kind="hf")
    with pytest.raises(PartFailed, match=r"kind = merged"):
        await bench.engine.prepare(bench.publish(1))
    await bench.engine.close()


async def test_a_thousand_adapters_leave_nothing_behind(tmp_path):
    channel = FilesystemChannel(str(tmp_path / "weights"))
    bench = Bench(kv_on_swap="finish", channel=channel)
    factors = random_adapter(bench.base, 0, rank=32, only=("q_proj", "v_proj"))
    alive: weakref.WeakSet[AdaptedWeights] = weakref.WeakSet()
    most, memory = 0, 0
    _, running = bench.start("0", 1)
    for version in range(1, 1001):
        await bench.engine.commit(publish_adapter(channel, factors, version))
        alive.add(bench.engine.core.weights)
        most = max(most, len(alive))
        if version % 4 == 0:
            if running.done():
                _, running = bench.start(f"{version}", 12)
            await asyncio.sleep(0)
        if version == 200:
            gc.collect()
            memory = psutil.Process().memory_info().rss
    gc.collect()
    assert bench.engine.core.version == 1000 and 3 <= most <= bench.engine.core.max_adapters + 1
    assert psutil.Process().memory_info().rss - memory < 400 * sum(factor.nbytes for factor in factors.values())
    assert len(list((tmp_path / "weights").rglob("*.safetensors"))) == 2
    await running
    await bench.engine.close()
