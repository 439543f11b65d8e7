"""Packing: what becomes an input, what a target, what is shared, what is left out, and what is counted."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.training.advantages import group_advantages
from headrace.training.batching import annotations_needed, filter_zero_variance, make_batches
from headrace.training.config import LossConfig, TrainingConfig
from headrace.training.metrics import batch_metrics, sharing_metrics
from headrace.types import Score
from training.helpers import group_of, random_group, sample_of, samples_in


def one(groups, credit, config=None, **more):
    ((batch,),) = make_batches(groups, credit, config or TrainingConfig(), max_length=8, **more)
    return batch


def path_to(batch, row):
    """The tokens that input `row` sees, itself last: its ancestors' segments, then its own up to it."""
    ids, segments = np.asarray(batch.token_ids), np.asarray(batch.segment_ids)
    seen = [ids[i] for i in range(row + 1) if segments[i] == segments[row]]
    parent = batch.segment_parents[segments[row]]
    while parent >= 0:
        seen = [*ids[segments == parent], *seen]
        parent = batch.segment_parents[parent]
    return [int(t) for t in seen]


def check(batch, samples):
    """Every target is predicted from exactly the tokens before it, in every sample, at the right position."""
    by_id = {s.sample_id: s for s in samples}
    for i, name in enumerate(batch.sample_ids):
        sample = by_id[name]
        targets = np.flatnonzero(sample.loss_mask[1:]) + 1
        mine = np.flatnonzero(batch.target_samples == i)
        assert batch.target_ids[mine].tolist() == sample.token_ids[targets].tolist()
        assert batch.target_positions[mine].tolist() == list(range(len(targets)))
        np.testing.assert_array_equal(batch.behavior_logprobs[mine], sample.behavior_logprobs[targets])
        np.testing.assert_array_equal(batch.target_versions[mine], sample.policy_versions[targets])
        for m, t in zip(mine, targets, strict=True):
            row = batch.target_rows[m]
            assert path_to(batch, row) == sample.token_ids[:t].tolist()
            assert batch.position_ids[row] == t - 1
    assert (np.diff(batch.segment_ids) >= 0).all()
    assert all(parent < i for i, parent in enumerate(batch.segment_parents))


def test_siblings_share_their_prompt_and_last_tokens_are_no_inputs():
    group = group_of(
        [sample_of([5, 6, 7], [8, 9, 10], sample_id="a"), sample_of([5, 6, 7], [11], sample_id="b")], [0.0, 1.0]
    )
    batch = one([group], [np.array([-1.0, 1.0])])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.segment_parents.tolist() == [-1, 0]
    assert batch.target_ids.tolist() == [8, 9, 10, 11]
    assert batch.target_rows.tolist() == [2, 3, 4, 2]
    assert batch.advantages.tolist() == [-1, -1, -1, 1]
    check(batch, samples_in([group]))


def test_the_measured_saving_592_inputs_instead_of_1664():
    """8 prompts of 18 tokens, 8 samples of 8 that have nothing else in common: prompt once and 7 inputs a sample."""
    groups = []
    for g in range(8):
        samples = [
            sample_of([100 + g] * 18, 1000 * g + 200 + 8 * i + np.arange(8), sample_id=f"{g}/{i}") for i in range(8)
        ]
        groups.append(group_of(samples, [0.0, 1.0] * 4))
    credit = [np.array([-1.0, 1.0] * 4)] * 8
    assert len(one(groups, credit).token_ids) == 8 * (18 + 8 * 7) == 592
    assert len(one(groups, credit, share_prefix=False).token_ids) == 64 * 25


def test_every_common_start_is_computed_once_across_siblings_and_groups():
    """Few-shot examples before every prompt; siblings that agree for a while, or altogether, or are a start of another."""
    shots = [9] * 20
    first = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 2, 3]]
    groups = [
        group_of(
            [sample_of([*shots, 50], ids, sample_id=f"a{i}") for i, ids in enumerate(first)], [1.0, 1.0, 0.0, 0.0]
        ),
        group_of([sample_of([*shots, 51], ids, sample_id=f"b{i}") for i, ids in enumerate([[1], [2, 1]])], [1.0, 0.0]),
    ]
    batch = one(groups, [np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0])])
    assert sorted(batch.token_ids.tolist()) == sorted([*shots, 50, 1, 2, 3, 51, 2])
    assert len(batch.target_ids) == 4 + 4 + 3 + 3 + 1 + 2
    metrics = sharing_metrics([[batch]])
    assert metrics["batch/inputs"].mean == 26
    assert metrics["batch/shared_share"].mean == pytest.approx(1 - 26 / (6 * 21 + 3 + 3 + 2 + 2 + 0 + 1))
    assert sharing_metrics([])["batch/shared_share"].mean == 0
    check(batch, samples_in(groups))


def test_a_start_is_common_only_as_far_as_its_experts_are():
    """Siblings of two weight versions may have gone through other experts with the same tokens."""
    ids = [1, 2, 3, 4]
    routes = np.zeros((5, 2, 1), dtype=np.int16)
    other = routes.copy()
    other[3] = 1  # of the input that predicts the third token
    samples = [
        dataclasses.replace(sample_of([9, 9], ids, sample_id=name), expert_routing=experts)
        for name, experts in (("a", routes), ("b", routes), ("c", other))
    ]
    batch = one([group_of(samples, [1.0, 0.0, 0.0])], [np.array([1.0, -0.5, -0.5])])
    assert batch.token_ids.tolist() == [9, 9, 1, 2, 3, 2, 3]
    check(batch, samples)
    for i, sample in enumerate(samples):
        rows = batch.target_rows[batch.target_samples == i]
        assert (batch.expert_routing[rows] == sample.expert_routing[1:]).all()
    assert (batch.expert_routing >= 0).all()
    elsewhere = dataclasses.replace(
        samples[1], expert_routing=1 - routes
    )  # a prompt that went another way from the start
    batch = one([group_of([samples[0], elsewhere], [1.0, 0.0])], [np.array([0.5, -0.5])])
    assert batch.token_ids.tolist() == [9, 9, 1, 2, 3] * 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), micro=st.sampled_from([1, 12, 30, 200]), share=st.booleans(), multi=st.booleans())
def test_any_groups_are_packed_right(seed, micro, share, multi):
    rng = np.random.default_rng(seed)
    groups = [
        random_group(rng, f"g{i}", size=int(rng.integers(1, 5)), prompt=int(rng.integers(1, 7)), multi_turn=multi)
        for i in range(int(rng.integers(1, 4)))
    ]
    credit = [rng.normal(size=g.size) for g in groups]
    (micros,) = make_batches(groups, credit, TrainingConfig(micro_tokens=micro), max_length=8, share_prefix=share)
    samples = samples_in(groups)
    assert sorted(n for b in micros for n in b.sample_ids) == sorted(s.sample_id for s in samples)
    for batch in micros:
        check(batch, samples)
        assert batch.counts == micros[0].counts
        longest = max(len(s.token_ids) - 1 for s in samples)
        assert len(batch.token_ids) <= max(micro, longest)
    assert micros[0].counts.tokens == sum(len(b.target_ids) for b in micros)
    assert micros[0].counts.sequences == len(samples)


def test_a_group_too_large_for_a_micro_batch_is_cut_with_its_prompt_in_each_part():
    group = group_of([sample_of([5] * 10, [7 + i, 8, 9], sample_id=str(i)) for i in range(6)], [0.0, 1.0] * 3)
    (micros,) = make_batches([group], [np.array([-1.0, 1.0] * 3)], TrainingConfig(micro_tokens=14), max_length=8)
    assert [len(b.sample_ids) for b in micros] == [2, 2, 2]
    assert all(len(b.token_ids) == 14 for b in micros)


def test_tokens_after_the_last_target_are_not_fed_in():
    sample = sample_of([5, 6], [7, 8, 9, 10], mask=[1, 0, 0, 0])
    assert one([group_of([sample], [1.0])], [np.ones(1)]).token_ids.tolist() == [5, 6]


def test_a_sampled_very_first_token_has_nothing_to_be_predicted_from():
    sample = sample_of([], [7, 8, 9])
    batch = one([group_of([sample], [1.0])], [np.ones(1)])
    assert batch.target_ids.tolist() == [8, 9] and batch.token_ids.tolist() == [7, 8]


@pytest.mark.parametrize("name", ["behavior_logprobs", "policy_versions"])
def test_a_sample_whose_arrays_are_not_of_one_length_is_named(name):
    samples = [sample_of([1], [2, 3]), sample_of([1], [2, 3])]
    samples[1] = dataclasses.replace(samples[1], sample_id="odd", **{name: getattr(samples[1], name)[:-1]})
    with pytest.raises(DataError, match=f"odd: 2 {name} for 3 tokens"):
        one([group_of(samples, [0.0, 1.0])], [np.array([1.0, -1.0])])


def test_minibatches_cut_the_groups_and_count_apart():
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}", size=2) for i in range(6)]
    batches = make_batches(groups, [rng.normal(size=2) for _ in groups], TrainingConfig(minibatches=3), max_length=8)
    assert len(batches) == 3 and [b[0].counts.groups for b in batches] == [2, 2, 2]
    assert batches[0][0].sample_groups.tolist() == [0, 0, 1, 1]


def test_idle_groups_are_left_out_but_counted():
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}", size=2) for i in range(2)]
    credit = [np.zeros(2), np.array([1.0, -1.0])]
    batch = one(groups, credit)
    assert set(batch.sample_ids) == {"g1/0", "g1/1"}
    assert batch.counts.groups == 2 and batch.counts.sequences == 4
    assert batch.counts.tokens == sum(s.completion_length for s in samples_in(groups))
    assert batch_metrics(groups, credit, TrainingConfig())["batch/idle_groups"].mean == 1
    with_kl = TrainingConfig(loss=LossConfig(kl_coef=0.1))
    assert len(one(groups, credit, with_kl).sample_ids) == 4
    own_loss = TrainingConfig(loss=LossConfig(function="some.module:fn"))
    assert len(one(groups, credit, own_loss).sample_ids) == 4


def test_per_token_credit_is_added_where_it_stands():
    group = group_of([sample_of([5, 6], [7, 8, 9], mask=[1, 0, 1])], [1.0])
    scored = Score(reward=1.0, per_token=np.array([9, 9, 0.5, 9, -0.5]))
    group = dataclasses.replace(group, scores=(scored,))
    assert one([group], [np.zeros(1)]).advantages.tolist() == [0.5, -0.5]


def test_supports_follow_their_targets_and_an_unrecorded_one_is_empty():
    recorded = sample_of([5, 6], [7, 8], kept=[[7, 1], [8, 2, 3]], sample_id="a")
    group = group_of([recorded, sample_of([5, 6], [9], sample_id="b")], [0.0, 1.0])
    mask = one([group], [np.array([-1.0, 1.0])]).sampling_mask
    assert mask.offsets.tolist() == [0, 2, 5, 5] and mask.token_ids.tolist() == [7, 1, 8, 2, 3]
    sampled_only = dataclasses.replace(
        recorded, sampling_mask=dataclasses.replace(recorded.sampling_mask, offsets=np.array([0, 2, 5]))
    )
    mask = one([group_of([sampled_only], [1.0])], [np.ones(1)]).sampling_mask
    assert mask.offsets.tolist() == [0, 2, 5]


def test_nothing_to_train_is_an_empty_list():
    config = TrainingConfig()
    assert make_batches([], [], config, max_length=8) == []
    group = group_of([sample_of([5], [7]), sample_of([5], [8])], [1.0, 1.0])
    assert make_batches([group], group_advantages([group], config.advantage), config, max_length=8) == []
    untrainable = group_of([sample_of([5, 6], [7], mask=[0])] * 2, [0.0, 1.0])
    assert make_batches([untrainable], [np.array([1.0, -1.0])], config, max_length=8) == []
    assert batch_metrics([], [], config)["batch/empty"].mean == 1


def test_zero_variance_groups_are_told_apart():
    groups = [
        group_of([sample_of([5], [7])] * len(r), r, f"g{i}")
        for i, r in enumerate([[1.0, 1.0], [0.0, 1.0], [None, 1.0], [None, None]])
    ]
    kept, dropped = filter_zero_variance(groups)
    assert [g.group_id for g in kept] == ["g1"] and [g.group_id for g in dropped] == ["g0", "g2", "g3"]
    assert batch_metrics(groups)["group/zero_variance_share"].mean == 0.75


def test_only_several_updates_a_batch_need_the_proximal_pass():
    assert annotations_needed(TrainingConfig()) == ()
    assert annotations_needed(TrainingConfig(loss=LossConfig(old_logprobs="trainer"))) == ()
    assert annotations_needed(TrainingConfig(epochs=2, loss=LossConfig(old_logprobs="trainer"))) == ("proximal",)
    assert annotations_needed(TrainingConfig(loss=LossConfig(kl_coef=0.1))) == ("reference",)


def test_metrics_by_hand():
    samples = [sample_of([5, 6], [7] * n, finish=f) for n, f in ((1, "stop"), (2, "stop"), (3, "length"), (6, "stop"))]
    parts = [{"exact": 1.0, "length": None}, {"exact": 0.0, "length": 2.0}, {"exact": 0.0}, {"exact": 1.0}]
    metrics = batch_metrics([group_of(samples, [1.0, 0.0, 0.0, 1.0], parts=parts)])
    assert metrics["reward/mean"].mean == 0.5 and metrics["reward/std"].mean == 0.5
    assert metrics["reward/part/exact"].mean == 0.5 and metrics["reward/part/length"].mean == 2.0
    assert metrics["length/mean"].mean == 3 and metrics["length/p50"].mean == 2.5
    assert metrics["length/p99"].mean == pytest.approx(5.91) and metrics["length/max"].maximum == 6
    assert metrics["length/truncated_share"].mean == 0.25 and metrics["length/prompt_mean"].mean == 2
