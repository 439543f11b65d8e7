"""The steps between products are the same compiled or not, and a pass gives the same whole or in parts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.exchange.channels.in_process import InProcessChannel
from headrace.rollout.engines.native import batches, kernels, llama
from headrace.rollout.engines.native.batches import share_out
from rollout.engines.engine_models import ask, build_engine, build_model, endless, folder_of, prompt_of, publish, until


def crowd(seed=0):
    """Three groups of siblings, single requests, prompts that end inside and at the end of a block."""
    requests = []
    for group, (length, siblings) in enumerate([(21, 4), (8, 3), (1, 1), (50, 1)]):
        for member in range(siblings):
            count = 5 + (37 * (group + member + seed)) % 90
            requests.append(ask(prompt_of(length, group), f"g{group}", member=member, **endless(count)))
    return requests


@pytest.fixture
def forms(monkeypatch):
    """A function that makes all later passes run in one way."""
    before = torch.get_num_threads()

    def use(form: str) -> None:
        def steps_for(dtype, size, shared):
            return llama.TorchSteps() if form == "torch" else llama.CompiledSteps(kernels, size, shared)

        monkeypatch.setattr(llama, "steps_for", steps_for)
        monkeypatch.setattr(batches, "_ROWS_WORTH_A_CORE", 1 if form == "parts" else 10_000)
        torch.set_num_threads(2)

    yield use
    torch.set_num_threads(before)


def assert_alike(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "engine", [{}, {"max_running": 3}, {"kv_tokens": 240}, {"kv_tokens": 240, "preemption": "save"}]
)
async def test_all_forms_of_a_pass_give_the_same(forms, engine, family):
    answers = []
    for form in ("torch", "whole", "parts"):
        forms(form)
        made = build_engine(folder=folder_of(family), **engine)
        answers.append(await asyncio.gather(*map(made.generate, crowd())))
        assert (made.core.crew._pool is not None) == (form == "parts")
        await made.close()
    assert_alike(answers[0], answers[1])
    assert_alike(answers[1], answers[2])


async def test_a_swap_in_the_middle_reaches_every_part(forms):
    answers = []
    for form in ("whole", "parts"):
        forms(form)
        channel = InProcessChannel()
        engine = build_engine(channel=channel)
        running = [asyncio.ensure_future(engine.generate(request)) for request in crowd(1)]
        await until(lambda stats: stats.generated_tokens >= 40, engine)
        await engine.commit(publish(channel, build_model("llama", seed=5), 2))
        answers.append(await asyncio.gather(*running))
        assert {2, -1} == {int(v) for got in answers[-1] for v in got.policy_versions}
        await engine.close()
    assert_alike(*answers)


async def test_sleep_gives_the_memory_of_keys_and_values_back():
    engine = build_engine()
    running = asyncio.ensure_future(engine.generate(ask(prompt_of(9), **endless(40))))
    await until(lambda stats: stats.generated_tokens >= 5, engine)
    assert engine.core.store.keys
    await engine.sleep(1)
    assert not engine.core.store.keys and not engine.core.store.values
    await engine.wake()
    assert (await running).token_ids.size == 40
    await engine.close()


def test_loops_that_cannot_be_compiled_are_replaced_aloud(monkeypatch):
    def full_disk(*shape):
        raise OSError("no space left on device")

    monkeypatch.setattr(kernels, "compile_all", full_disk)
    llama.steps_for.cache_clear()
    with pytest.warns(UserWarning, match="slower.*no space left"):
        assert isinstance(llama.steps_for(torch.float32, 8, 1), llama.TorchSteps)
    llama.steps_for.cache_clear()
    assert isinstance(llama.steps_for(torch.bfloat16, 8, 1), llama.TorchSteps)


def test_this_machine_runs_compiled_loops():
    llama.steps_for.cache_clear()
    assert isinstance(llama.steps_for(torch.float32, 8, 1), llama.CompiledSteps)


@given(pieces=st.lists(st.integers(1, 300), max_size=12), decoding=st.integers(0, 200), cores=st.integers(1, 9))
def test_shares_hold_every_row_once_and_are_even(pieces, decoding, cores):
    pieces = [(f"p{index}", count) for index, count in enumerate(pieces)]
    rows = [f"d{index}" for index in range(decoding)]
    shares = share_out(pieces, rows, cores)
    assert sorted(piece for share in shares for piece in share[0]) == sorted(pieces)
    assert sorted(row for share in shares for row in share[1]) == sorted(rows)
    assert all(share[1] == sorted(share[1], key=rows.index) for share in shares)
    loads = [sum(count for _, count in share[0]) + len(share[1]) for share in shares]
    assert 1 <= len(shares) <= cores
    assert len(shares) in (1, cores)  # a part has one thread: no core is left out
    if len(shares) > 1:
        assert min(loads) > 0 and max(loads) <= 1.3 * sum(loads) / len(loads)


def test_exponentials_are_right_over_their_range():
    x = np.concatenate([np.linspace(-86, 88, 200_001), [-1e38, 0.0, -0.0]]).astype(np.float32)[None]
    out = np.empty_like(x)
    kernels.gate(np.concatenate([x, np.ones_like(x)], axis=1), out)
    exact = x.astype(np.float64) / (1 + np.exp(np.minimum(-x.astype(np.float64), 700)))
    np.testing.assert_allclose(out, exact, rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_none(spoilt):
    steps = llama.CompiledSteps(kernels, 8, 1)
    x = torch.zeros(2, 8)
    x[1, 3] = spoilt
    normed = steps.norm(x, torch.zeros(2, 8), torch.ones(8), 1e-5)
    gated = steps.gate(torch.cat([x, torch.full((2, 8), spoilt)], dim=1))
    assert torch.isfinite(normed[0]).all() and not torch.isfinite(normed[1]).all()
    assert not torch.isfinite(gated[1, 3])
    qkv = np.zeros((2, 3, 8), np.float32)
    kept = np.zeros((4, 1, 8), np.float32)
    kept[2] = spoilt
    out = np.zeros((2, 8), np.float32)
    tables, lengths = np.array([[0, 1], [0, 2]]), np.array([2, 2])
    kernels.attend_for(8, 1)(qkv, 0, tables, lengths, kept, kept, np.float32(1.0), out)
    assert np.isfinite(out[0]).all() and not np.isfinite(out[1]).any()
