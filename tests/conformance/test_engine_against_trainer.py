"""An unchanged policy has ratio 1: what the engine recorded of each draw is what the trainer computes over again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.rollout.token_rollout import Transcript
from headrace.training.batching import make_batches
from headrace.training.config import TrainingConfig
from headrace.training.policy import Policy, load_model
from headrace.types import Episode, Group, Score, Task, TokenSample
from rollout.engines.engine_models import ask, build_engine, endless, folder_of, prompt_of


def sample_of(*turns, name="s") -> TokenSample:
    """(request or tokens to add, generation) of each turn, as the rollout records them."""
    transcript = Transcript()
    for prompt, generation in turns:
        transcript.add_prompt(prompt)
        transcript.add_generation(generation)
    return transcript.sample(name)


async def groups_of(engine, requests) -> list[Group]:
    """Siblings (same lease) as one group each."""
    got = await asyncio.gather(*map(engine.generate, requests))
    by_group: dict[str, list[TokenSample]] = {}
    for request, one in zip(requests, got, strict=True):
        by_group.setdefault(request.group_id, []).append(sample_of((request.prompt_ids, one), name=request.request_id))
    return [group_of(name, samples) for name, samples in by_group.items()]


def group_of(name: str, samples: list[TokenSample]) -> Group:
    return Group(
        group_id=name,
        task=Task(task_id=name, source="test", payload={}),
        expected_size=len(samples),
        episodes=tuple(Episode(episode_id=one.sample_id, samples=(one,)) for one in samples),
        scores=tuple(Score(reward=float(i)) for i in range(len(samples))),
    )


def with_samples(groups: list[Group], change: Callable[[TokenSample], TokenSample]) -> list[Group]:
    """The groups with each sample changed."""
    return [
        dataclasses.replace(
            group,
            episodes=tuple(dataclasses.replace(one, samples=tuple(map(change, one.samples))) for one in group.episodes),
        )
        for group in groups
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
        dict(repetition_penalty=1.6),
        dict(logit_bias=tuple((i, 3.0 - i / 10) for i in range(2, 40)), temperature=0.8),
        dict(repetition_penalty=0.7, logit_bias=((9, 4.0), (9, -1.0)), top_p=0.8, temperature=1.3),
    ],
    ids=str,
)
async def test_ratio_is_one_over_the_recorded_support(sampling):
    engine = build_engine()
    groups = await groups_of(engine, siblings(**sampling))
    await engine.close()
    assert np.abs(log_ratios(groups, folder_of(), micro_tokens=64)).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
async def test_ratio_is_one_over_all_turns_of_a_conversation(family):
    engine = build_engine(folder=folder_of(family))
    options = dict(top_p=0.8, record_sampling_mask=True, record_expert_routing=True, **endless(7))
    first_prompt, tool = prompt_of(6), prompt_of(5, 1)
    first = await engine.generate(ask(first_prompt, "t", **options))
    conversation = [*first_prompt, *first.token_ids, *tool]
    second = await engine.generate(ask(conversation, "u", **options))
    await engine.close()
    sample = sample_of((first_prompt, first), (tool, second))
    assert sample.sampling_mask.offsets.size == 15 and (sample.expert_routing is None) == (family == "llama")
    assert family == "llama" or len(sample.expert_routing) == len(sample.token_ids) - 1
    assert np.abs(log_ratios([group_of("g", [sample])], folder_of(family))).max() < 1e-4


async def test_without_the_record_the_ratio_is_off():
    engine = build_engine()
    groups = await groups_of(engine, siblings(top_p=0.8, record_sampling_mask=False))
    await engine.close()
    assert np.abs(log_ratios(groups, folder_of())).max() > 0.1


async def test_the_trainer_computes_with_the_experts_that_the_engine_used():
    folder = folder_of("qwen3_moe")
    engine = build_engine(folder=folder)
    groups = await groups_of(engine, siblings(record_expert_routing=True))
    await engine.close()
    assert np.abs(log_ratios(groups, folder, micro_tokens=64)).max() < 1e-4

    def other_expert(sample: TokenSample) -> TokenSample:
        """Its seventh token made by an expert that was not among the chosen."""
        routes = sample.expert_routing.copy()
        at = int(np.argmax(sample.loss_mask)) - 1 + 6
        routes[at, 1, 0] = next(e for e in range(4) if e not in routes[at, 1])
        return dataclasses.replace(sample, expert_routing=routes)

    changed = with_samples(groups, other_expert)
    gaps = np.abs(log_ratios(changed, folder)).reshape(9, 12)
    # What comes before a changed token, and in another sequence, stays as it was.
    assert gaps[:, :6].max() < 1e-4 and np.median(gaps[:, 6]) > 0.1


async def test_a_prompt_is_forced_through_the_experts_that_the_engine_used():
    """What stands before a prompt's last token reaches the first sampled one through its keys and values."""
    folder = folder_of("qwen3_moe")
    engine = build_engine(folder=folder)
    groups = await groups_of(engine, siblings(record_expert_routing=True))
    await engine.close()

    def other_start(sample: TokenSample) -> TokenSample:
        routes = sample.expert_routing.copy()
        routes[0, 0] = [e for e in range(4) if e not in routes[0, 0]]
        return dataclasses.replace(sample, expert_routing=routes)

    changed = with_samples(groups, other_start)
    assert np.median(np.abs(log_ratios(changed, folder)).reshape(9, 12)[:, 0]) > 1e-3


async def test_routes_hold_through_gradient_checkpointing():
    folder = folder_of("qwen3_moe")
    engine = build_engine(folder=folder)
    groups = await groups_of(engine, siblings(record_expert_routing=True))
    await engine.close()
    grads = []
    for checkpointing in (False, True):
        policy = Policy(load_model(folder, "float32"), logits_chunk=16, gradient_checkpointing=checkpointing)
        advantages = [np.ones(3, dtype=np.float32)] * 3
        ((batch,),) = make_batches(groups, advantages, TrainingConfig(), max_length=64)
        assert (batch.expert_routing >= 0).all()  # prompts included
        logprobs, _ = policy.logprobs(batch)
        logprobs.sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
@pytest.mark.parametrize(("weights", "low", "high"), [("bfloat16", 1e-4, 0.05), ("int8", 1e-3, 0.3)])
async def test_rounded_weights_show_as_a_ratio_and_nothing_else_does(weights, low, high, family):
    engine = build_engine(folder=folder_of(family), weights=weights)
    groups = await groups_of(engine, siblings(top_p=0.8))
    await engine.close()
    assert low < np.abs(log_ratios(groups, folder_of(family))).mean() < high
