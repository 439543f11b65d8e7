"""Which experts made each token: recorded as the model chose them, and forced on a model that would choose others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.errors import ModelError, RequestRefused
from headrace.policies.routers import Routers
from rollout.engines.engine_models import (
    EXPERTS,
    ask,
    build_engine,
    build_model,
    endless,
    folder_of,
    prompt_of,
    sampled,
    until,
)


def chosen_by(model, token_ids) -> np.ndarray:
    """[T, layers, top_k] experts of one plain forward pass."""
    seen = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [module.register_forward_hook(lambda _m, _i, out: seen.append(out[2])) for module in routers]
    with torch.inference_mode():
        model(torch.tensor(token_ids)[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).numpy()


@pytest.mark.parametrize("kind", ["native", "hf"])
@pytest.mark.parametrize("family", EXPERTS)
async def test_routes_are_those_of_a_plain_forward_pass(kind, family):
    engine, model = build_engine(kind, folder_of(family)), build_model(family)
    requests = [
        ask(prompt_of(9 + g, g), f"g{g}", member=m, record_expert_routing=True, **endless(10))
        for g in range(3)
        for m in range(3)
    ]
    for request, got in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
        whole = chosen_by(model, [*request.prompt_ids, *got.token_ids])
        assert got.expert_routing.shape == (10, 2, 2) and got.expert_routing.dtype == np.uint8
        np.testing.assert_array_equal(got.expert_routing, whole[request.prompt_ids.size - 1 : -1])
        # Of siblings, who share the keys and values of their prompt, as well.
        assert got.prompt_routing.dtype == np.uint8
        np.testing.assert_array_equal(got.prompt_routing, whole[: request.prompt_ids.size - 1])
    assert len({one.tobytes() for one in got.expert_routing}) > 1
    await engine.close()


@pytest.mark.parametrize("kind", ["native", "hf"])
async def test_routes_survive_a_resume_and_come_in_pieces(kind):
    engine = build_engine(kind, folder_of("qwen3_moe"))
    options = dict(record_expert_routing=True, **endless(12))
    whole = await engine.generate(ask(prompt_of(7), "w", **options))
    pieces = [piece async for piece in engine.stream(ask(prompt_of(7), "s", **options))]
    joined = np.concatenate([piece.expert_routing for piece in pieces if piece.expert_routing is not None])
    np.testing.assert_array_equal(joined, whole.expert_routing)
    np.testing.assert_array_equal(pieces[-1].prompt_routing, whole.prompt_routing)
    part = replace(
        whole,
        token_ids=whole.token_ids[:5],
        logprobs=whole.logprobs[:5],
        policy_versions=whole.policy_versions[:5],
        expert_routing=whole.expert_routing[:5],
    )
    again = await engine.generate(ask(prompt_of(7), "r", prefix=part, **options))
    np.testing.assert_array_equal(again.expert_routing, whole.expert_routing)
    np.testing.assert_array_equal(again.prompt_routing, whole.prompt_routing)
    with pytest.raises(RequestRefused, match="no expert routes"):
        await engine.generate(ask(prompt_of(7), "n", prefix=replace(part, expert_routing=None), **options))
    await engine.close()


@pytest.mark.parametrize("how", ["pieces", "prefix", "turn", "preempted", "handle", "fixed"])
async def test_the_routes_of_a_prompt_are_known_whoever_computed_it(how, tmp_path):
    """In pieces, for somebody who recorded nothing, in an earlier turn, before it was preempted, in another engine."""
    more = {"preempted": dict(kv_tokens=64, preemption="save"), "handle": dict(kv_folder=str(tmp_path)), "fixed": dict(deterministic=True)}  # fmt: skip
    engine = build_engine(folder=folder_of("qwen3_moe"), prefill_tokens=8, **more.get(how, {}))
    model, prompt, options = build_model("qwen3_moe"), prompt_of(21), dict(record_expert_routing=True, **endless(8))
    request = ask(prompt, "r", **options)
    if how == "prefix":
        await engine.generate(ask(prompt, "p", **endless(5)))
    elif how == "turn":
        first = await engine.generate(ask(prompt[:9], "t", **endless(7)))
        request = ask([*prompt[:9], *first.token_ids, *prompt[9:]], "r", **options)
    if how == "preempted":
        older = [engine.generate(ask(prompt_of(12, i), f"o{i}", **endless(30))) for i in range(2)]
        got = (await asyncio.gather(*older, engine.generate(request)))[-1]
        assert (await engine.stats()).preemptions > 0
    elif how == "handle":
        task = asyncio.ensure_future(engine.generate(request))
        await until(lambda s: sampled(s, request) >= 3, engine)
        part = await engine.abort(request.request_id, keep_kv=True)
        await task
        await engine.close()
        engine = build_engine(folder=folder_of("qwen3_moe"), kv_folder=str(tmp_path))
        part = replace(part, prompt_routing=None)
        request = ask(prompt, "r", attempt=1, prefix=part, kv_handle=part.kv_handle, **options)
        got = await engine.generate(request)
        assert (await engine.stats()).prefill_s == 0
    else:
        got = await engine.generate(request)
    whole = chosen_by(model, [*request.prompt_ids, *got.token_ids])
    np.testing.assert_array_equal(got.prompt_routing, whole[: request.prompt_ids.size - 1])
    np.testing.assert_array_equal(got.expert_routing, whole[request.prompt_ids.size - 1 : -1])
    await engine.close()


async def test_nothing_is_recorded_unasked_or_without_experts():
    for family, asked in (("qwen3_moe", False), ("llama", True)):
        engine = build_engine(folder=folder_of(family))
        got = await engine.generate(ask(prompt_of(7), record_expert_routing=asked, **endless(4)))
        assert got.expert_routing is None and got.prompt_routing is None
        await engine.close()


@pytest.mark.parametrize("family", EXPERTS)
def test_forcing_what_a_model_chooses_changes_nothing_and_another_choice_does(family):
    model, ids = build_model(family), torch.tensor(prompt_of(9))[None]
    routers = Routers.of(model)
    assert Routers.of(model) is routers and len(routers) == 2
    with torch.inference_mode():
        free = model(ids).logits
        own = torch.from_numpy(routers.rows(slice(None)).astype(np.int64))
        routers.forced = own
        assert torch.allclose(model(ids).logits, free, atol=1e-6)
        routers.forced = torch.full_like(own, -1)
        assert torch.equal(model(ids).logits, free)
        # Another expert for the fourth token in the last layer: its logits change, and no other's.
        routers.forced = own.clone()
        routers.forced[3, 1, 0] = next(e for e in range(4) if e not in own[3, 1].tolist())
        gap = (model(ids).logits - free).abs().amax(-1)[0]
        assert gap[3] > 1e-3 and gap[[0, 1, 2, 4, 5, 6, 7, 8]].max() < 1e-6
        assert routers.rows(slice(None)).shape == (9, 2, 2)
        routers.forced = own[:, :, :1]
        with pytest.raises(ModelError, match="shape"):
            model(ids)


def test_a_router_that_weighs_otherwise_is_not_forced():
    class OddTopKRouter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            logits = x @ self.weight.t()
            values, indices = torch.sigmoid(logits).topk(2)
            return logits, values, indices

    model = torch.nn.Sequential(OddTopKRouter())
    routers = Routers.of(model)
    model(torch.randn(5, 3))
    routers.forced = torch.zeros(5, 1, 2, dtype=torch.int64)
    with pytest.raises(ModelError, match="OddTopKRouter"):
        model(torch.randn(5, 3))
