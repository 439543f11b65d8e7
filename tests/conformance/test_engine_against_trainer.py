"""An unchanged policy has ratio 1: what the engine recorded of each draw is what the trainer computes over again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.training.batching import make_batches
from headrace.training.config import TrainingConfig
from headrace.training.policy import Policy, load_model
from headrace.types import Episode, Group, Score, Task, TokenSample
from rollout.engines.engine_models import ask, build_engine, endless, folder_of, prompt_of


def sample_of(request, generation, name="s") -> TokenSample:
    """A single turn as the rollout records it."""
    prompt, count = request.prompt_ids, generation.token_ids.size
    return TokenSample(
        sample_id=name,
        token_ids=np.concatenate([prompt, generation.token_ids]),
        loss_mask=np.repeat([0, 1], [prompt.size, count]).astype(np.int8),
        behavior_logprobs=np.concatenate([np.zeros(prompt.size, np.float32), generation.logprobs]),
        policy_versions=np.concatenate([np.full(prompt.size, -1), generation.policy_versions]),
        sampling=generation.sampling,
        finish_reason=generation.finish_reason,
        sampling_mask=generation.sampling_mask,
        expert_routing=generation.expert_routing,
    )


async def groups_of(engine, requests) -> list[Group]:
    """Siblings (same lease) as one group each."""
    got = await asyncio.gather(*map(engine.generate, requests))
    by_group: dict[str, list[TokenSample]] = {}
    for request, one in zip(requests, got, strict=True):
        by_group.setdefault(request.group_id, []).append(sample_of(request, one, request.request_id))
    return [
        Group(
            group_id=name,
            task=Task(task_id=name, source="test", payload={}),
            expected_size=len(samples),
            episodes=tuple(Episode(episode_id=one.sample_id, samples=(one,)) for one in samples),
            scores=tuple(Score(reward=float(i)) for i in range(len(samples))),
        )
        for name, samples in by_group.items()
    ]


def log_ratios(groups, folder, **training) -> np.ndarray:
    """[M] trainer's minus engine's log-probability of every sampled token."""
    policy = Policy(load_model(folder, "float32"), logits_chunk=16)
    advantages = [np.arange(len(group.episodes), dtype=np.float32) + 1 for group in groups]
    config = TrainingConfig(**training)
    gaps = []
    for minibatch in make_batches(groups, advantages, config, max_length=64):
        for batch in minibatch:
            logprobs, _ = policy.logprobs(batch)
            gaps.append(logprobs.detach().numpy() - batch.behavior_logprobs)
    return np.concatenate(gaps)


def siblings(**sampling):
    return [
        ask(prompt_of(4 + 3 * g, g), f"g{g}", member=m, **{"record_sampling_mask": True, **endless(12), **sampling})
        for g in range(3)
        for m in range(3)
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        dict(top_p=0.8),
        dict(top_p=0.8, temperature=0.7),
        dict(top_k=5),
        dict(min_p=0.1, min_tokens=0),
        dict(allowed_token_ids=tuple(range(2, 30))),
        dict(top_k=20, top_p=0.9, min_p=0.02, min_tokens=4),
        dict(min_tokens=6),
    ],
    ids=str,
)
async def test_ratio_is_one_over_the_recorded_support(sampling):
    engine = build_engine()
    groups = await groups_of(engine, siblings(**sampling))
    await engine.close()
    assert np.abs(log_ratios(groups, folder_of(), micro_tokens=64)).max() < 1e-4


async def test_without_the_record_the_ratio_is_off():
    engine = build_engine()
    groups = await groups_of(engine, siblings(top_p=0.8, record_sampling_mask=False))
    await engine.close()
    assert np.abs(log_ratios(groups, folder_of())).max() > 0.1
