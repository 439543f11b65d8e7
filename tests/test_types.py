"""Shortcuts of the shared types equal the plain way."""

import pickle
from dataclasses import fields

import numpy as np

from headrace.types import (
    NO_VERSION,
    Episode,
    GenerateRequest,
    Generation,
    Group,
    RequestKey,
    SamplingMask,
    SamplingParams,
    Score,
    Task,
    TokenSample,
)


def test_sampling_travels_once_in_a_message():
    """All requests of a run share it, and each has its own seed."""
    sampling = SamplingParams(stop=("a long text that ends a generation",))
    requests = [
        GenerateRequest(
            key=RequestKey(lease_id=f"0-{i}"), group_id="0", prompt_ids=np.arange(3), sampling=sampling, seed=i
        )
        for i in range(64)
    ]
    sent = pickle.dumps(requests, 5)
    arrived = pickle.loads(sent)
    assert sent.count(b"ends a generation") == 1 and len({id(one.sampling) for one in arrived}) == 1
    assert [one.seed for one in arrived] == list(range(64)) and arrived[5].sampling == sampling


def test_what_travels_arrives_equal_and_its_arrays_can_be_written_to():
    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2).transpose(1, 0, 2)
    sent = Generation(
        token_ids=np.arange(6)[::2],
        logprobs=np.array([-0.5, -1.0, 0.0], np.float32),
        policy_versions=np.zeros(0, np.int64),
        finish_reason="stop",
        sampling=SamplingParams(stop=("a",), seed=7),
        sampling_mask=SamplingMask(token_ids=np.arange(2), offsets=np.arange(3)),
        expert_routing=routes,
    )
    got = pickle.loads(pickle.dumps(sent, protocol=5))
    for field in fields(Generation):
        want, found = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(want, np.ndarray):
            assert found.dtype == want.dtype and np.array_equal(found, want) and found.flags.writeable
        elif field.name != "sampling_mask":
            assert found == want
    assert np.array_equal(got.sampling_mask.offsets, sent.sampling_mask.offsets)
    score = pickle.loads(pickle.dumps(Score(reward=None, parts={"a": 1.0})))
    assert (score.reward, score.parts, score.per_token) == (None, {"a": 1.0}, None)


def test_the_oldest_version_of_a_group_is_that_of_its_oldest_sampled_token():
    def sample(versions):
        zeros = np.zeros(len(versions))
        return TokenSample(
            sample_id="s",
            token_ids=zeros.astype(np.int64),
            loss_mask=(np.array(versions) != NO_VERSION).astype(np.int8),
            behavior_logprobs=zeros.astype(np.float32),
            policy_versions=np.array(versions, np.int64),
            sampling=SamplingParams(),
            finish_reason="stop",
        )

    young, old, none = sample([NO_VERSION, 5, 6]), sample([NO_VERSION, 3, 7]), sample([NO_VERSION])
    assert (young.oldest_version, none.oldest_version) == (5, NO_VERSION)
    assert (young.completion_length, none.completion_length) == (2, 0)
    episodes = tuple(Episode(episode_id=str(i), samples=(one,)) for i, one in enumerate((young, old, none)))
    task = Task(task_id="t", source="s", payload={})
    group = Group(group_id="g", task=task, expected_size=3, episodes=episodes, scores=())
    assert group.oldest_version == 3
    assert Group(group_id="g", task=task, expected_size=0, episodes=(), scores=()).oldest_version == NO_VERSION
