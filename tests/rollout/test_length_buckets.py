"""Tasks in the order of length buckets: each once, batches of like length, the same again after a restore."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.config import load_config
from headrace.rollout.sources.length_buckets import WINDOW, LengthBuckets
from headrace.rollout.sources.rows import Rows, RowSource
from headrace.types import Episode, Group, SamplingParams, TokenSample
from runs.launch import lab, untrained

__all__ = ["lab", "untrained"]


def rows(count: int) -> Rows:
    lengths = np.random.default_rng(0).permutation(count) + 1
    return Rows(
        name="t", length=count, get=lambda i: (str(i), {"prompt": "x" * int(lengths[i])}), fingerprint=str(count)
    )


def buckets(count: int = 160, batch: int = 10, epochs: int = 1) -> LengthBuckets:
    return LengthBuckets(RowSource(rows(count), seed=1, shuffle=True, epochs=epochs), batch, seed=1)


def drain(source) -> list:
    return list(iter(source.next, None))


def group(task, length: int) -> Group:
    sample = TokenSample(
        sample_id="s",
        token_ids=np.zeros(length, np.int64),
        loss_mask=np.ones(length, np.int8),
        behavior_logprobs=np.zeros(length, np.float32),
        policy_versions=np.zeros(length, np.int64),
        sampling=SamplingParams(),
        finish_reason="stop",
    )
    return Group(
        group_id="g", task=task, expected_size=1, episodes=(Episode(episode_id="e", samples=(sample,)),), scores=()
    )


def test_every_task_is_given_once_and_batches_are_of_like_length():
    given = drain(buckets())
    assert sorted(t.task_id for t in given) == sorted(f"t:{i}#0" for i in range(160))
    lengths = [len(t.payload["prompt"]) for t in given]
    spread = [np.ptp(lengths[start : start + 10]) for start in range(0, 160, 10)]
    plain = [len(t.payload["prompt"]) for t in drain(RowSource(rows(160), seed=1, shuffle=True, epochs=1))]
    plain_spread = [np.ptp(plain[start : start + 10]) for start in range(0, 160, 10)]
    assert max(spread) < 0.5 * min(plain_spread)
    firsts = [lengths[start] for start in range(0, 10 * WINDOW, 10)]
    assert firsts != sorted(firsts), "short batches do not all come first"


def test_answers_seen_before_decide_over_the_prompt():
    source = buckets(count=5 * WINDOW, batch=5, epochs=2)  # a window is an epoch
    first = [source.next() for _ in range(5 * WINDOW)]
    long = {task.task_id.partition("#")[0] for number, task in enumerate(first) if number % 2}
    for task in first:
        source.observe(group(task, 100 if task.task_id.partition("#")[0] in long else 10))
    second = [task.task_id.partition("#")[0] in long for task in drain(source)]
    batches = [set(second[start : start + 5]) for start in range(0, len(second), 5)]
    assert len(second) == 5 * WINDOW and sum(len(batch) == 1 for batch in batches) >= len(batches) - 1


def test_a_restored_source_goes_on_in_the_same_order():
    source = buckets()
    for _ in range(37):
        source.next()
    state = source.state()
    rest = [task.task_id for task in drain(source)]
    again = buckets()
    again.restore(state)
    assert [task.task_id for task in drain(again)] == rest


def test_a_fresh_state_restores_to_the_start():
    source, again = buckets(), buckets()
    again.restore(source.state())
    assert [t.task_id for t in drain(again)] == [t.task_id for t in drain(source)]


@pytest.mark.slow
def test_a_run_in_the_order_of_length_buckets(lab):
    ran = lab.here("rollout.order=length_bucket", "training.steps=3")
    assert ran.code == 0, ran.err


def test_the_order_is_a_choice():
    assert load_config("tiny", ["rollout.order=length_bucket"]).rollout.order == "length_bucket"
