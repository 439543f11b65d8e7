"""What the embedded engine does beyond the contract: sharing, bounds, preemption, fixed shapes, families."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from headrace.errors import ModelError, RequestRefused
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.rollout.engines.models import named_weights, weights_digest
from headrace.rollout.engines.native.llama import LlamaWeights
from rollout.engines.engine_models import (
    EXPERTS,
    FAMILIES,
    FAST,
    ask,
    build_engine,
    build_model,
    endless,
    folder_of,
    forcing,
    plain_logprobs,
    prompt_of,
    publish,
    reference,
    sampled,
    until,
)


async def run(engine, requests):
    return await asyncio.gather(*map(engine.generate, requests))


def tokens(generations):
    return [got.token_ids.tolist() for got in generations]


def mixed(count=12, longest=30):
    """Ragged prompts and lengths."""
    return [
        ask(prompt_of(1 + (7 * i) % longest, i), f"m{i}", member=i, **endless(3 + (5 * i) % 23)) for i in range(count)
    ]


# ---------------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_gives_the_logprobs_of_a_plain_forward_pass(family):
    engine = build_engine(folder=folder_of(family))
    assert isinstance(engine.core.weights, LlamaWeights) == (family in FAST)
    requests = [ask(prompt_of(n, n), f"p{n}", member=m, max_tokens=24) for n in (1, 5, 8, 40) for m in range(3)]
    for request, got in zip(requests, await run(engine, requests), strict=True):
        np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(family), request, got), atol=1e-4)
    await engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_are_those_of_generate_where_the_gap_is_clear(family):
    model = reference(family)
    engine = build_engine(folder=folder_of(family))
    requests = [ask(prompt_of(n, n), f"g{n}", temperature=0.0, max_tokens=24) for n in (1, 6, 21)]
    for request, got in zip(requests, await run(engine, requests), strict=True):
        ids = torch.tensor(request.prompt_ids)[None]
        with torch.inference_mode():
            out = model.generate(
                ids,
                max_new_tokens=24,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                attention_mask=torch.ones_like(ids),
            )
        expected = out.sequences[0, ids.shape[1] :].tolist()
        for at, (mine, theirs) in enumerate(zip(got.token_ids.tolist(), expected, strict=False)):
            best = out.logits[at][0].topk(2).values
            if best[0] - best[1] <= 1e-4:
                break
            assert mine == theirs, f"token {at}"
        else:
            assert got.token_ids.size == len(expected)
    await engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_published_weights_replace_the_whole_model(family):
    channel, other = InProcessChannel(), build_model(family, seed=5)
    engine = build_engine(folder=folder_of(family), channel=channel)
    for version in (1, 2, 3):  # the third is written into the memory of the first
        model = other if version != 2 else reference(family)
        await engine.commit(publish(channel, model, version))
        request = ask(prompt_of(9), f"v{version}", max_tokens=12)
        got = await engine.generate(request)
        np.testing.assert_allclose(got.logprobs, plain_logprobs(model, request, got), atol=1e-4)
    await engine.close()


async def test_a_tied_head_may_be_left_out_of_what_is_published():
    for family in ("qwen2", "gemma"):
        channel, other = InProcessChannel(), build_model(family, seed=5)
        engine = build_engine(folder=folder_of(family), channel=channel)
        named = [(name, tensor) for name, tensor in other.state_dict().items() if name != "lm_head.weight"]
        await engine.commit(channel.publish(named, 1))
        request = ask(prompt_of(9), max_tokens=12)
        got = await engine.generate(request)
        np.testing.assert_allclose(got.logprobs, plain_logprobs(other, request, got), atol=1e-4)
        await engine.close()


async def test_bfloat16_runs_and_stays_near():
    engine = build_engine(dtype="bfloat16")
    request = ask(prompt_of(9), max_tokens=12)
    got = await engine.generate(request)
    assert np.abs(got.logprobs - plain_logprobs(reference(), request, got)).mean() < 0.2
    await engine.close()


async def test_a_rope_that_is_scaled_is_followed():
    scaled = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    }  # fmt: skip
    import tempfile

    model = build_model("llama", rope_parameters=scaled)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = build_engine(folder=folder)
    request = ask(prompt_of(90), max_tokens=12)
    got = await engine.generate(request)
    np.testing.assert_allclose(got.logprobs, plain_logprobs(model, request, got), atol=1e-4)
    assert np.abs(got.logprobs - plain_logprobs(reference(), request, got)).max() > 1e-3
    await engine.close()


# ----------------------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_prompt_is_computed_once_for_eight_siblings(deterministic):
    engine = build_engine(deterministic=deterministic)
    rows = []
    forward = engine.core.weights.forward

    class Counting:
        def forward(self, batch, store):
            rows.append(sum(stretch.stop - stretch.start for stretch in batch.stretches))
            return forward(batch, store)

    engine.core.weights = Counting()
    requests = [ask(prompt_of(21), "g", member=m, **endless(6)) for m in range(8)]
    got = await run(engine, requests)
    stats = await engine.stats()
    assert sum(rows) == (64 if deterministic else 21)  # fixed shapes: one pass of 64 rows
    assert stats.prompt_tokens - stats.cached_prompt_tokens == 21 and stats.prompt_tokens == 8 * 21
    assert len({tuple(ids) for ids in tokens(got)}) > 4  # siblings have their own seeds
    for request, one in zip(requests, got, strict=True):
        np.testing.assert_allclose(one.logprobs, plain_logprobs(reference(), request, one), atol=1e-4)
    await engine.close()


async def test_a_common_beginning_is_shared_between_different_prompts():
    engine = build_engine()
    system = prompt_of(20)
    requests = [ask(system + prompt_of(5, i), f"s{i}", max_tokens=8) for i in range(4)]
    for request in requests:
        got = await engine.generate(request)
        np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(), request, got), atol=1e-4)
    assert (await engine.stats()).cached_prompt_tokens == 3 * 20
    await engine.close()


async def test_different_prompts_that_come_together_compute_their_common_beginning_once():
    engine = build_engine()
    system = prompt_of(20)
    requests = [ask(system + prompt_of(5, i), f"s{i}", max_tokens=8) for i in range(6)]
    for request, got in zip(requests, await run(engine, requests), strict=True):
        np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(), request, got), atol=1e-4)
    stats = await engine.stats()
    assert stats.prompt_tokens == 6 * 25 and stats.prompt_tokens - stats.cached_prompt_tokens == 20 + 6 * 5
    await engine.close()


async def test_siblings_that_come_one_by_one_share_their_prompt_while_the_first_still_runs():
    engine = build_engine()
    tasks = []
    for member in range(4):
        request = ask(prompt_of(21), "g", member=member, **endless(30))
        tasks.append(asyncio.ensure_future(engine.generate(request)))
        await until(lambda s, r=request: sampled(s, r) >= 2, engine)
    assert (await engine.stats()).running == 4
    await asyncio.gather(*tasks)
    stats = await engine.stats()
    assert stats.prompt_tokens - stats.cached_prompt_tokens == 21
    await engine.close()


async def test_a_second_turn_computes_what_is_new_in_it():
    engine = build_engine()
    first = await engine.generate(ask(prompt_of(18), "t", **endless(9)))
    request = ask(prompt_of(18) + first.token_ids.tolist() + prompt_of(6, 1), "t2", **endless(5))
    got = await engine.generate(request)
    stats = await engine.stats()
    # The last sampled token was never fed in.
    assert stats.prompt_tokens - stats.cached_prompt_tokens == 18 + 1 + 6
    np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(), request, got), atol=1e-4)
    await engine.close()


async def test_a_long_prompt_does_not_hold_up_those_who_decode():
    engine = build_engine(prefill_tokens=16)
    short, long = ask(prompt_of(4), "short", **endless(60)), ask(prompt_of(400, 1), "long", **endless(3))
    tasks = [asyncio.ensure_future(engine.generate(short))]
    await until(lambda s: sampled(s, short) >= 2, engine)
    before = sampled(await engine.stats(), short)
    tasks.append(asyncio.ensure_future(engine.generate(long)))
    await until(lambda s: sampled(s, long) >= 1, engine)
    assert sampled(await engine.stats(), short) - before >= 400 // 16
    for request, got in zip((short, long), await asyncio.gather(*tasks), strict=True):
        np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(), request, got), atol=1e-4)
    await engine.close()


async def test_siblings_write_into_blocks_of_their_own():
    """A prompt that ends inside a block: what one sibling writes there must not reach another."""
    engine = build_engine(block_size=16)
    requests = [ask(prompt_of(5), "g", member=m, **endless(10)) for m in range(8)]
    together = await run(engine, requests)
    for request, one in zip(requests, together, strict=True):
        np.testing.assert_allclose(one.logprobs, plain_logprobs(reference(), request, one), atol=1e-4)
    await engine.close()


async def test_prompts_longer_than_a_pass_are_computed_in_pieces():
    engine = build_engine()
    requests = [ask(prompt_of(n, n), f"long{n}", max_tokens=6) for n in (513, 700, 12)]
    for request, got in zip(requests, await run(engine, requests), strict=True):
        np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(), request, got), atol=1e-4)
    await engine.close()


# ------------------------------------------------------------------------------------------------- bounds and order


@pytest.mark.parametrize("kv_tokens", [56, 64, 100])
async def test_little_memory_changes_nothing_but_time(kv_tokens):
    """Room for little more than one request: sixteen still give what an unlimited engine gives."""
    requests = mixed(16)
    free, tight = build_engine(), build_engine(kv_tokens=kv_tokens)
    plenty, scarce = await run(free, requests), await asyncio.wait_for(run(tight, requests), 60)
    assert tokens(plenty) == tokens(scarce)
    for a, b in zip(plenty, scarce, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    stats = await tight.stats()
    assert stats.preemptions > 0 and stats.kv_tokens_total <= kv_tokens and stats.kv_tokens_used == 0
    await free.close()
    await tight.close()


@pytest.mark.parametrize("kv_saved_mb", [1, 0])
async def test_preempted_keys_and_values_are_saved_as_long_as_there_is_room_for_them(kv_saved_mb):
    requests = mixed(16)
    free = build_engine()
    tight = build_engine(kv_tokens=64, preemption="save", kv_saved_mb=kv_saved_mb)
    plenty, scarce = await run(free, requests), await asyncio.wait_for(run(tight, requests), 60)
    assert tokens(plenty) == tokens(scarce)
    stats = await tight.stats()
    assert stats.preemptions > 0 and (stats.recomputed_tokens == 0) == (kv_saved_mb == 1)
    assert stats.kv_tokens_used == 0 and tight.core.saves.bytes == 0
    await free.close()
    await tight.close()


async def test_blocks_never_run_over_the_bound():
    engine = build_engine(kv_tokens=64)
    most = 0
    advance = engine.core.advance

    def watched():
        nonlocal most
        advance()
        most = max(most, engine.core.kv_tokens()[0])

    engine.core.advance = watched
    await run(engine, mixed(10))
    assert 32 < most <= 64
    await engine.close()


async def test_a_prompt_that_can_never_fit_is_refused_and_one_that_fits_ends_at_the_bound():
    engine = build_engine(kv_tokens=32)
    with pytest.raises(RequestRefused, match="kv_tokens"):
        await engine.generate(ask(prompt_of(32)))
    got = await engine.generate(ask(prompt_of(30), **endless(50)))
    assert got.token_ids.size == 2 and got.finish_reason == "length"
    await engine.close()


async def test_more_requests_than_slots_all_end():
    engine = build_engine(max_running=3)
    got = await run(engine, mixed(14))
    assert [one.token_ids.size for one in got] == [3 + (5 * i) % 23 for i in range(14)]
    await engine.close()


async def test_requests_come_and_go_at_random_and_no_block_is_lost():
    engine = build_engine(kv_tokens=96, max_running=5)
    rng = np.random.default_rng(0)

    async def one(i):
        await asyncio.sleep(float(rng.random()) * 0.02)
        request = ask(
            prompt_of(int(rng.integers(1, 20)), int(rng.integers(4))), f"r{i}", **endless(int(rng.integers(1, 30)))
        )
        task = asyncio.ensure_future(engine.generate(request))
        if rng.random() < 0.4:
            await asyncio.sleep(float(rng.random()) * 0.02)
            await engine.abort(request.request_id)
        return await task

    await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(40))), 60)
    stats = await engine.stats()
    assert stats.running == stats.waiting == stats.kv_tokens_used == 0
    engine.core.table.clear()
    assert not any(engine.core.table.counts)
    await engine.close()


# ------------------------------------------------------------------------------------------------------------- swaps


async def test_after_a_swap_nothing_cached_is_used():
    channel, other = InProcessChannel(), build_model("llama", seed=9)
    engine = build_engine(channel=channel)
    await engine.generate(ask(prompt_of(24), "a", max_tokens=4))
    await engine.commit(publish(channel, other, 1))
    before = (await engine.stats()).cached_prompt_tokens
    request = ask(prompt_of(24), "b", max_tokens=8)
    got = await engine.generate(request)
    assert (await engine.stats()).cached_prompt_tokens == before == 0
    np.testing.assert_allclose(got.logprobs, plain_logprobs(other, request, got), atol=1e-4)
    await engine.close()


@pytest.mark.parametrize(("kv_on_swap", "running", "recomputed"), [("keep", "go_on", False), ("recompute", "go_on", True), ("recompute", "freeze", False)])  # fmt: skip
async def test_older_keys_and_values_stay_or_go_as_asked(kv_on_swap, running, recomputed):
    """After a swap, a recomputed sequence has the new model's log-probabilities; a kept one has them of a mixture."""
    channel, other = InProcessChannel(), build_model("llama", seed=9)
    engine = build_engine(channel=channel, kv_on_swap=kv_on_swap)
    request = ask(prompt_of(20), **endless(40))
    task = asyncio.ensure_future(engine.generate(request))
    await until(lambda s: sampled(s, request) >= 10, engine)
    await engine.commit(publish(channel, other, 1), running)
    got = await task
    new = got.policy_versions == 1
    gap = np.abs(got.logprobs - plain_logprobs(other, request, got))[new].max()
    assert (gap < 1e-4) == recomputed
    await engine.close()


async def test_an_unfinished_prefill_starts_again_under_the_new_weights():
    channel, other = InProcessChannel(), build_model("llama", seed=9)
    engine = build_engine(channel=channel)
    request = ask(prompt_of(900), max_tokens=6)
    task = asyncio.ensure_future(engine.generate(request))
    await until(lambda s: s.running == 1, engine)
    while not engine.core.running[0].kv_length:
        await asyncio.sleep(0)
    assert 0 < engine.core.running[0].kv_length < 900
    await engine.commit(publish(channel, other, 1))
    got = await task
    assert set(got.policy_versions.tolist()) == {1}
    np.testing.assert_allclose(got.logprobs, plain_logprobs(other, request, got), atol=1e-4)
    await engine.close()


async def test_a_sibling_admitted_after_the_swap_does_not_share_the_older_prompt():
    channel, other = InProcessChannel(), build_model("llama", seed=9)
    engine = build_engine(channel=channel, max_running=1)
    first, second = (ask(prompt_of(20), "g", member=m, **endless(30)) for m in range(2))
    tasks = [asyncio.ensure_future(engine.generate(one)) for one in (first, second)]
    await until(lambda s: sampled(s, first) >= 5, engine)
    await engine.commit(publish(channel, other, 1))
    _, late = await asyncio.gather(*tasks)
    assert set(late.policy_versions.tolist()) == {1}
    np.testing.assert_allclose(late.logprobs, plain_logprobs(other, second, late), atol=1e-4)
    await engine.close()


async def test_the_stand_still_of_a_swap_is_measured_and_short():
    channel = InProcessChannel()
    engine = build_engine(channel=channel, inline=False)
    request = ask(prompt_of(20), **endless(900))
    task = asyncio.ensure_future(engine.generate(request))
    for version in range(1, 6):
        ticket = publish(channel, reference(), version)
        await engine.prepare(ticket)
        await until(lambda s, v=version: sampled(s, request) >= 5 * v, engine)
        await engine.commit(ticket)
        then = sampled(await engine.stats(), request)
        await until(lambda s, n=then + 2: sampled(s, request) > n, engine)
        assert 0 < (await engine.stats()).standstill_s < 0.5
    await engine.abort(request.request_id)
    await task
    await engine.close()


# --------------------------------------------------------------------------------------------------- repeating exactly


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe"])
async def test_fixed_shapes_are_bit_equal_alone_and_in_a_crowd(family):
    def fixed(**more):
        return build_engine(folder=folder_of(family), deterministic=True, max_running=6, **more)

    crowd = fixed()
    together = await run(crowd, mixed(9))
    alone = []
    for request in mixed(9):
        engine = fixed()
        alone.append(await engine.generate(request))
        await engine.close()
    await crowd.close()
    assert tokens(together) == tokens(alone)
    assert [one.logprobs.tolist() for one in together] == [one.logprobs.tolist() for one in alone]


async def test_fixed_shapes_are_bit_equal_whatever_was_shared_preempted_or_cut_short():
    """A crowd with common beginnings in little memory, and one that is cut and resumed, against cold engines."""
    requests = [ask(prompt_of(13) + prompt_of(3 + i, i % 3), f"c{i}", member=i, **endless(20)) for i in range(8)]

    def fixed(**more):
        return build_engine(deterministic=True, max_running=6, prefill_tokens=7, **more)

    crowd = fixed(kv_tokens=64)
    cut = asyncio.ensure_future(crowd.generate(requests[0]))
    await until(lambda s: sampled(s, requests[0]) >= 9, crowd)
    part = await crowd.abort(requests[0].request_id)
    await cut
    resumed = ask(requests[0].prompt_ids, "c0", attempt=1, prefix=part, **endless(20))
    together = await run(crowd, [resumed, *requests[1:]])
    stats = await crowd.stats()
    assert stats.preemptions > 0 and stats.cached_prompt_tokens > 0 and stats.recomputed_tokens > 0
    for request, one in zip(requests, together, strict=True):
        engine = fixed()
        alone = await engine.generate(request)
        assert one.token_ids.tolist() == alone.token_ids.tolist()
        assert one.logprobs.tolist() == alone.logprobs.tolist()
        await engine.close()
    await crowd.close()


async def test_an_inline_run_repeats_bit_for_bit():
    async def once():
        engine = build_engine(kv_tokens=128)
        got = await run(engine, mixed(12))
        await engine.close()
        return got

    a, b = await once(), await once()
    assert tokens(a) == tokens(b)
    assert [one.logprobs.tolist() for one in a] == [one.logprobs.tolist() for one in b]


async def test_weights_that_are_not_finite_fail_the_request_and_spare_the_engine():
    channel = InProcessChannel()
    engine = build_engine(channel=channel)
    broken = [(name, tensor * float("nan")) for name, tensor in reference().state_dict().items()]
    await engine.commit(channel.publish(broken, 1))
    with pytest.raises(Exception, match="version 1 are not finite"):
        await engine.generate(ask(prompt_of(5)))
    await engine.commit(publish(channel, reference(), 2))
    assert (await engine.generate(ask(prompt_of(5), "b", **endless(3)))).token_ids.size == 3
    await engine.close()


async def test_forced_weights_do_force():
    channel = InProcessChannel()
    engine = build_engine(channel=channel)
    await engine.commit(channel.publish(forcing(reference(), 42), 1))
    got = await engine.generate(ask(prompt_of(5), **endless(6)))
    assert got.token_ids.tolist() == [42] * 6
    await engine.close()


# ------------------------------------------------------------------------------------------------------------ packing


def test_a_packed_product_is_the_plain_one():
    from headrace.rollout.engines.native.linear import Linear, PackedLinear

    torch.manual_seed(0)
    weight, bias = torch.randn(4096, 320) / 18, torch.randn(4096)
    packed, plain = PackedLinear(weight, bias), Linear(weight, bias)
    for rows in (1, 2, 3, 8, 64, 200):
        x = torch.randn(rows, 320)
        torch.testing.assert_close(packed(x), plain(x), atol=2e-5, rtol=1e-5)


def test_small_weights_and_other_types_are_not_packed():
    from headrace.rollout.engines.native.linear import PackedLinear

    assert PackedLinear(torch.randn(64, 64)).packed is None
    assert PackedLinear(torch.zeros(4096, 320, dtype=torch.bfloat16)).packed is None


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
async def test_an_engine_with_packed_weights_agrees_with_a_plain_forward_pass(monkeypatch, family):
    """Of a family whose pass is not written out: those have panels (`test_parts`)."""
    from headrace.rollout.engines.native import linear

    if not linear.can_pack():
        pytest.skip("this build of torch has no packed linear")
    packed = []
    product = linear._packed_product
    monkeypatch.setattr(linear, "_packed_product", lambda *args: packed.append(1) or product(*args))
    monkeypatch.setattr(linear, "_WORTH_PACKING", 1)
    channel = InProcessChannel()
    engine = build_engine(folder=folder_of(family), channel=channel)
    for version, model in ((1, build_model(family, seed=9)), (2, reference(family))):
        await engine.commit(publish(channel, model, version))
        requests = [ask(prompt_of(n, n), f"p{n}.{version}", max_tokens=16) for n in (2, 9, 30)]
        for request, got in zip(requests, await run(engine, requests), strict=True):
            np.testing.assert_allclose(got.logprobs, plain_logprobs(model, request, got), atol=1e-4)
    assert packed
    await engine.close()


# ------------------------------------------------------------------------------------------------------ rounded weights


@pytest.mark.parametrize(("form", "bound"), [("bfloat16", 0.003), ("int8", 0.02)])
@pytest.mark.parametrize("rows", [1, 8, 9, 64])
def test_a_rounded_product_is_near_the_exact_one(form, bound, rows):
    """Within the error of its weights and of bfloat16 inputs; the error it reports is that of its weights."""
    from headrace.rollout.engines.native.linear import FORMS, relative_error

    torch.manual_seed(0)
    weight, bias, x = torch.randn(256, 320) / 18, torch.randn(256), torch.randn(rows, 320)
    rounded = FORMS[form](weight, bias)
    assert 1e-4 < rounded.error < bound
    assert relative_error(torch.nn.functional.linear(x, weight, bias), rounded(x)) < bound


def test_zero_rows_of_a_weight_stay_zero():
    from headrace.rollout.engines.native.linear import Int8Linear

    weight = torch.randn(32, 64)
    weight[3] = 0.0
    assert not Int8Linear(weight)(torch.randn(5, 64))[:, 3].any()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in EXPERTS])
@pytest.mark.parametrize(("form", "error", "gap"), [("bfloat16", 0.004, 0.05), ("int8", 0.02, 0.3)])
async def test_rounded_weights_are_made_at_each_sync_and_say_how_far_they_are_off(form, error, gap, family):
    channel = InProcessChannel()
    engine = build_engine(folder=folder_of(family), channel=channel, weights=form)
    for version, model in ((1, build_model(family, seed=9)), (2, reference(family))):
        await engine.commit(publish(channel, model, version))
        requests = [ask(prompt_of(n, n), f"p{n}.{version}", max_tokens=16) for n in (2, 9, 30)]
        for request, got in zip(requests, await run(engine, requests), strict=True):
            off = np.abs(got.logprobs - plain_logprobs(model, request, got))
            assert 0 < off.mean() < gap
    assert 1e-4 < (await engine.stats()).weight_error < error
    # What was published is still there, bit for bit.
    assert await engine.fingerprint() == weights_digest(named_weights(reference(family)))
    await engine.close()


@pytest.mark.parametrize(("kind", "family"), [("native", "qwen3_moe"), ("hf", "llama")])
def test_rounded_weights_are_refused_where_there_are_none(kind, family):
    with pytest.raises(ModelError, match=r"rollout\.engine\.weights"):
        build_engine(kind, folder_of(family), weights="int8")


# --------------------------------------------------------------------------------------------------------- documentation


async def test_the_example_of_the_engines_page_does_what_it_says():
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs" / "engine.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(compile(code, "docs/engine.md", "exec"), names)
    part, whole = await names["main"](folder_of())
    assert part.finish_reason == "abort" and part.kv_handle and 0 < part.token_ids.size < 200
    assert whole.token_ids.size == 200 and whole.token_ids[: part.token_ids.size].tolist() == part.token_ids.tolist()
