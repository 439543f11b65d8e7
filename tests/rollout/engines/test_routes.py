"""Which experts made each token: recorded as the model chose them, and forced on a model that would choose others."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from headrace.errors import ModelError, RequestRefused
from headrace.policies.routers import Routers
from rollout.engines.engine_models import EXPERTS, ask, build_engine, build_model, endless, folder_of, prompt_of


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
    from dataclasses import replace

    part = replace(
        whole,
        token_ids=whole.token_ids[:5],
        logprobs=whole.logprobs[:5],
        policy_versions=whole.policy_versions[:5],
        expert_routing=whole.expert_routing[:5],
    )
    again = await engine.generate(ask(prompt_of(7), "r", prefix=part, **options))
    np.testing.assert_array_equal(again.expert_routing, whole.expert_routing)
    with pytest.raises(RequestRefused, match="no expert routes"):
        await engine.generate(ask(prompt_of(7), "n", prefix=replace(part, expert_routing=None), **options))
    await engine.close()


async def test_nothing_is_recorded_unasked_or_without_experts():
    for family, asked in (("qwen3_moe", False), ("llama", True)):
        engine = build_engine(folder=folder_of(family))
        got = await engine.generate(ask(prompt_of(7), record_expert_routing=asked, **endless(4)))
        assert got.expert_routing is None
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
