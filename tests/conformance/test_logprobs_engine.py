"""Conformance L1, L2, N5 and N6 on the engines: what was really sampled from, and who says how a generation ended."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.exchange.channels.in_process import InProcessChannel
from rollout.engines.engine_models import END, ask, build_engine, folder_of, plain_logprobs, prompt_of, reference

pytestmark = pytest.mark.parametrize("kind", ["native", "hf"])


async def test_l1_the_logprob_is_that_of_the_tempered_distribution(kind):
    """Logits [2, 0] on two tokens and nothing elsewhere, temperature 0.5: -0.01815."""
    channel, model = InProcessChannel(), reference()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"].fill_(1.0)
    tensors["model.norm.weight"].fill_(1.0)
    head = tensors["lm_head.weight"].fill_(-10.0)
    head[50], head[51] = 2 / 32, 0.0  # the hidden state is 32 ones
    engine = build_engine(kind, channel=channel)
    await engine.commit(channel.publish(list(tensors.items()), 1))
    right = {50: -0.01815, 51: -4.01815}
    for seed in range(5):
        got = await engine.generate(ask([5, 6], f"l{seed}", temperature=0.5, seed=seed, max_tokens=30))
        for token, logprob in zip(got.token_ids.tolist(), got.logprobs.tolist(), strict=True):
            assert logprob == pytest.approx(right[token], abs=1e-4)
    await engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("together", [1, 8])
async def test_l2_engine_and_plain_forward_agree(kind, temperature, together):
    engine = build_engine(kind)
    requests = [
        ask(prompt_of(3 + 5 * i, i), f"q{i}", temperature=temperature, max_tokens=25) for i in range(together)
    ] + [ask(prompt_of(9), "shared", member=m, temperature=temperature, max_tokens=25) for m in range(together // 2)]
    for request, got in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
        np.testing.assert_allclose(got.logprobs, plain_logprobs(reference(), request, got, temperature), atol=1e-4)
    await engine.close()


async def test_n5_a_sampled_end_token_is_part_of_the_generation_with_its_logprob(kind):
    engine = build_engine(kind)
    requests = [ask(prompt_of(6, i), f"e{i}", seed=i, max_tokens=60) for i in range(8)]
    ended = 0
    for request, got in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
        if got.finish_reason == "stop":
            ended += 1
            assert got.token_ids[-1] == END == got.matched_stop
            assert got.logprobs[-1] < 0
            assert got.logprobs[-1] == pytest.approx(plain_logprobs(reference(), request, got)[-1], abs=1e-4)
        else:
            assert got.token_ids.size == 60 and END not in got.token_ids
    assert ended
    await engine.close()


async def test_n6_replies_that_end_on_any_of_several_end_tokens_are_not_truncated(kind, tmp_path):
    """The model's own end tokens come from its generation config as well as from its config."""
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(folder_of(), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 60, 61]}))
    channel, model = InProcessChannel(), reference()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["model.embed_tokens.weight"].fill_(1.0)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1.0)
    head = tensors["lm_head.weight"].fill_(-10.0)
    for token in (END, 60, 61, 62, 10, 11, 12, 13):
        head[token] = 0.0
    engine = build_engine(kind, str(folder), channel=channel)
    await engine.commit(channel.publish(list(tensors.items()), 1))
    requests = [ask([5], f"n{i}", seed=i, max_tokens=400, stop_token_ids=(62,)) for i in range(24)]
    got = await asyncio.gather(*map(engine.generate, requests))
    assert {one.finish_reason for one in got} == {"stop"}
    assert {one.matched_stop for one in got} == {END, 60, 61, 62}
    assert all(one.token_ids[-1] == one.matched_stop for one in got)
    await engine.close()
