"""The steps of a pass are the same compiled or not, and to the bit whoever takes part in them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.cores import work_beside
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.pages import LargePages
from headrace.rollout.engines.native import compiled, kernels, llama, team, tiles
from headrace.rollout.engines.native.linear import to_int8
from headrace.vectors import PANEL
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
    """A function that makes all engines built after it run in one way."""
    before, compiled = torch.get_num_threads(), llama.steps_for

    def use(form: str) -> None:
        monkeypatch.setattr(llama, "steps_for", compiled if form != "torch" else lambda *shape: llama.TorchSteps())
        monkeypatch.setattr(team, "WORTH_MEETING", 0)
        torch.set_num_threads(2 if form == "team" else 1)

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
    for form in ("torch", "alone", "team"):
        forms(form)
        made = build_engine(folder=folder_of(family), **engine)
        answers.append(await asyncio.gather(*map(made.generate, crowd())))
        if form != "torch":
            assert (made.core.weights.shape.steps._team._pool is not None) == (form == "team")
        await made.close()
    assert_alike(answers[0], answers[1])
    for alone, team_ in zip(*answers[1:], strict=True):
        assert alone.token_ids.tolist() == team_.token_ids.tolist()
        assert alone.logprobs.tolist() == team_.logprobs.tolist()


async def test_a_swap_in_the_middle_reaches_all_threads(forms):
    answers = []
    for form in ("alone", "team"):
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

    monkeypatch.setattr(kernels, "attend_for", full_disk)
    with pytest.warns(UserWarning, match="slower.*no space left"):
        assert isinstance(llama.steps_for(torch.float32, 8, 1), llama.TorchSteps)
    assert isinstance(llama.steps_for(torch.bfloat16, 8, 1), llama.TorchSteps)


def test_this_machine_runs_compiled_loops():
    assert isinstance(llama.steps_for(torch.float32, 8, 1), compiled.CompiledSteps)


def test_exponentials_are_right_over_their_range():
    x = np.concatenate([np.linspace(-86, 88, 200_001), [-1e38, 0.0, -0.0]]).astype(np.float32)[None]
    out = compiled.CompiledSteps(8, 1).gate(torch.from_numpy(np.concatenate([x, np.ones_like(x)], axis=1))).numpy()
    exact = x.astype(np.float64) / (1 + np.exp(np.minimum(-x.astype(np.float64), 700)))
    np.testing.assert_allclose(out, exact, rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_none(spoilt):
    steps = compiled.CompiledSteps(8, 1)
    x = torch.zeros(2, 8)
    x[1, 3] = spoilt
    normed = steps.norm(x, torch.zeros(2, 8), torch.ones(8), 1e-5)
    gated = steps.gate(torch.cat([x, torch.full((2, 8), spoilt)], dim=1))
    assert torch.isfinite(normed[0]).all() and not torch.isfinite(normed[1]).all()
    assert not torch.isfinite(gated[1, 3])
    kept = torch.zeros(4, 1, 8)
    kept[2] = spoilt
    for values in (kept, torch.ones(4, 1, 8)):
        out = attend(steps, torch.zeros(2, 3, 8), [[0, 1], [0, 2]], kept, values, 1)
        assert torch.isfinite(out[0]).all() and not torch.isfinite(out[1]).any()


def attend(steps, qkv, slots, keys, values, kv_heads, parts=1):
    """What a team makes of each row's queries, over some slots each."""
    out = torch.zeros(qkv.shape[0], qkv.shape[1] - 2 * kv_heads, qkv.shape[2])
    counts = torch.tensor([len(one) for one in slots])
    arrays = (
        qkv,
        counts.cumsum(0) - counts,
        counts,
        torch.tensor([slot for one in slots for slot in one]),
        keys,
        values,
        out,
    )
    numbers = (*(one.data_ptr() for one in arrays), int(np.float32(0.5).view(np.int32)), kv_heads, parts)
    steps._team.run(steps._attend, len(slots) * parts, numbers)
    return out


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"), [(64, 9, 3), (80, 4, 2), (128, 14, 2), (8, 1, 1), (24, 5, 1), (256, 2, 2)]
)
def test_attention_of_any_shape_of_heads_is_that_of_torch(size, heads, kv_heads):
    torch.manual_seed(size)
    steps = compiled.CompiledSteps(size, heads // kv_heads)
    keys, values, qkv = (
        torch.randn(70, kv_heads, size),
        torch.randn(70, kv_heads, size),
        torch.randn(4, heads + 2 * kv_heads, size),
    )
    slots = [[7], list(range(69, 0, -3)), list(range(33)), [5, 5, 6, 1]]
    out = attend(steps, qkv, slots, keys, values, kv_heads)
    assert torch.equal(out, attend(steps, qkv, slots, keys, values, kv_heads, parts=kv_heads))
    for row, where in enumerate(slots):
        exact = torch.nn.functional.scaled_dot_product_attention(
            qkv[row, :heads, None],
            keys[where].transpose(0, 1),
            values[where].transpose(0, 1),
            scale=0.5,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[row], exact[:, 0], atol=2e-6, rtol=2e-5)


def test_scores_far_apart_give_no_numbers_that_take_long():
    kept, qkv = torch.zeros(3, 1, 8), torch.ones(1, 3, 8)
    kept[1], kept[2] = -30.0, -22.0
    out = attend(compiled.CompiledSteps(8, 1), qkv, [[0, 1, 2]], kept, torch.ones(3, 1, 8), 1)
    assert out.tolist() == [[[1.0] * 8]]


UNITS = ["panels", "tiles"]


def made_product(unit, form, weight, bias=None, steps=None):
    """By panels or by the matrix unit, where there is one."""
    steps = steps or compiled.CompiledSteps(8, 1, form)
    steps._linear = compiled.TileLinear if unit == "tiles" else compiled.PanelLinear
    return steps.linear(form, weight, bias, None, LargePages(4 * weight.numel()))


with_unit = pytest.mark.skipif(not tiles.available(), reason="no matrix unit")


@pytest.fixture(params=["panels", pytest.param("tiles", marks=with_unit)])
def unit(request):
    return request.param


@given(
    rows=st.integers(1, 70) | st.sampled_from([128, 129, 300]), outputs=st.integers(1, 5 * PANEL) | st.sampled_from([PANEL, 4 * PANEL]), inputs=st.sampled_from([1, 3, 64, 2047, 2049, 5000]),
    threads=st.integers(1, 3), form=st.sampled_from(["packed", "bfloat16", "int8"]), biased=st.booleans(), unit=st.sampled_from(UNITS),
)  # fmt: skip
def test_a_compiled_product_is_that_with_its_weights(rows, outputs, inputs, threads, form, biased, unit):
    """Whatever the rows, the threads and the form; and to the bit what each row alone gives."""
    assume(unit != "tiles" or tiles.available())
    torch.manual_seed(rows)
    before = torch.get_num_threads()
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    bias = torch.randn(outputs) if biased else None
    steps = compiled.CompiledSteps(8, 1, form)
    product = made_product(unit, form, weight, bias, steps)
    try:
        torch.set_num_threads(threads)
        with steps.gathered(1 << 40):
            out = product(x).clone()
    finally:
        torch.set_num_threads(before)
    if form == "bfloat16":
        weight = weight.bfloat16().float()
    elif form == "int8":
        integers, scales = to_int8(weight)
        weight = integers * scales[:, None]
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (out - exact).abs().max() < 1e-5 * max(1, inputs) ** 0.5 * 5
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(product(x[row : row + 1]), out[row : row + 1])


def error_of(product, x, weight) -> float:
    """Root mean square of what a product is off, in parts of what it adds up."""
    x, weight = x.double(), weight.double()
    return float((((product - x @ weight.t()) / (x.abs() @ weight.abs().t())) ** 2).mean().sqrt())


@with_unit
@pytest.mark.parametrize("inputs", [64, 576, 1536, 100])
@pytest.mark.parametrize("outlier", [0, 300, 10_000])
@pytest.mark.parametrize("kind", ["normal", "heavy", "small", "large"])
def test_the_matrix_unit_loses_no_more_than_sums_of_float32(inputs, outlier, kind):
    """Nor does it where one input outweighs all others by hundreds of times and does not count; by thousands it loses more."""
    torch.manual_seed(inputs)
    weight, x = torch.randn(96, inputs) * 0.05, torch.randn(40, inputs)
    if kind == "heavy":
        x = x**3
    elif kind != "normal":
        weight, x = weight / {"small": 1e-20, "large": 1e24}[kind], x * {"small": 1e-20, "large": 1e24}[kind]
    if outlier:
        x[:, 3] = outlier * x.abs().mean()
        weight[:, 3] = 0.0
    error = {unit: error_of(made_product(unit, "packed", weight)(x), x, weight) for unit in UNITS}
    assert error["tiles"] < (2e-6 if outlier > 1000 else error["panels"] + 2e-8)


@pytest.mark.parametrize("form", ["packed", "bfloat16", "int8"])
def test_weights_are_packed_the_same_in_pieces_beside_passes(unit, form):
    torch.manual_seed(1)
    weight, x = torch.randn(3000, 576), torch.randn(3, 576)  # more than one piece
    whole = made_product(unit, form, weight)

    def beside():
        work_beside(lambda: False)
        return made_product(unit, form, weight)

    with ThreadPoolExecutor(1) as pool:
        pieces = pool.submit(beside).result()
    assert torch.equal(whole.panels, pieces.panels)
    assert torch.equal(whole(x).clone(), pieces(x))


FRESH = """
import torch
from headrace.pages import LargePages
from headrace.rollout.engines.native import compiled
torch.manual_seed(0)
weight, x = torch.randn(600, 576), torch.randn(200, 576)
for form, most in (("packed", 1e-6), ("bfloat16", 0.01), ("int8", 0.05), ("packed", 1e-6)):
    steps = compiled.CompiledSteps(8, 1, form)
    product = steps.linear(form, weight, None, None, LargePages(0))
    exact = x.double() @ weight.double().t()
    torch.set_num_threads(3)
    with steps.gathered(1 << 40):
        for _ in range(40):
            assert (product(x) - exact).norm() < most * exact.norm(), form
    torch.set_num_threads(1)
"""


def test_forms_compiled_anew_in_one_process_and_with_one_heap_are_kept_apart(tmp_path):
    """Nothing that was compiled for another form, and no memory that another thread has, is used."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "MALLOC_ARENA_MAX": "1"}
    subprocess.run([sys.executable, "-c", FRESH], env=env, check=True, timeout=300)


@with_unit
def test_what_is_no_number_stays_none_in_the_matrix_unit():
    weight, x = torch.randn(40, 70), torch.randn(20, 70)
    weight[5, 1], weight[6] = float("nan"), 0.0
    x[2, 69], x[3, 0], x[4] = float("inf"), float("nan"), 0.0
    x[7], x[8] = 1e-38, 1e30
    out = made_product("tiles", "packed", weight)(x)
    assert out[:, 5].isnan().all()
    assert out[[2, 3]].isnan().all()
    rest = [i for i in range(20) if i not in (2, 3)]
    kept = [j for j in range(40) if j != 5]
    assert (out[:, 6][rest] == 0).all()
    assert (out[4][kept] == 0).all()
    ordinary = [i for i in rest if i != 8]
    assert torch.allclose(out[8][kept] / 1e30, ((x[8] / 1e30) @ weight.t())[kept], atol=1e-4)
    assert torch.allclose(out[ordinary][:, kept], (x @ weight.t())[ordinary][:, kept], atol=1e-4)


def test_without_a_matrix_unit_products_run_by_panels(monkeypatch):
    monkeypatch.setattr(tiles, "available", lambda: False)
    product = compiled.CompiledSteps(8, 1).linear("packed", torch.randn(40, 70), None, None, LargePages(0))
    assert isinstance(product, compiled.PanelLinear)


def test_a_failure_in_a_pass_sends_the_helpers_home():
    steps, before = compiled.CompiledSteps(8, 1), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError), steps.gathered(1 << 40):
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
        for helper in steps._team._helpers:
            helper.result(timeout=30)
    finally:
        torch.set_num_threads(before)


def test_crowded_teams_keep_their_units_apart(unit):
    """Four teams of three on few cores, so that threads are held up everywhere, again and again; one team after the other is
    thrown away with helpers that may not have seen its end."""
    torch.manual_seed(0)
    weight, x = torch.randn(8 * PANEL, 96), torch.randn(40, 96)
    exact = made_product(unit, "packed", weight)(x).clone()
    wrong = []

    def work() -> None:
        torch.set_num_threads(3)
        for _ in range(15):
            steps = compiled.CompiledSteps(8, 1)
            product = made_product(unit, "packed", weight, steps=steps)
            for _ in range(6):
                with steps.gathered(1 << 40):
                    wrong.extend(1 for _ in range(20) if not torch.equal(product(x), exact))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert not wrong
