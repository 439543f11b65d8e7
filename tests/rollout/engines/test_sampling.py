"""Drawing tokens: the distribution, its truncation, its log-probabilities, its randomness and its record."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.engines.sampling import Draw
from headrace.rollout.engines.sampling import sample as sample_in_place
from headrace.rollout.engines.sequences import counter_uniform
from headrace.types import SamplingParams


def sample(logits, draws):
    return sample_in_place(logits.clone(), draws)


ALMOST_ONE = 1.0 - 2.0**-53


def draw_many(logits, count, **params):
    """`count` draws of one row at evenly spaced random numbers."""
    rows = logits[None].expand(count, -1)
    sampling = SamplingParams(**params)
    return sample(rows, [Draw(sampling, (i + 0.5) / count, record=True) for i in range(count)])


@pytest.mark.parametrize("vocab", [5, 256, 700])
def test_draws_follow_the_softmax(vocab):
    torch.manual_seed(0)
    logits = 2 * torch.randn(vocab)
    drawn = draw_many(logits, 4000, temperature=0.7)
    share = np.bincount([d.token for d in drawn], minlength=vocab) / 4000
    # Evenly spaced numbers hit each token its share of times, give or take one.
    np.testing.assert_allclose(share, (logits / 0.7).softmax(-1).numpy(), atol=1.01 / 4000 + 1e-6)


def test_the_logprob_is_that_of_the_tempered_distribution():
    """Conformance L1, engine side: -0.01815, not -0.12693 (no temperature), not -0.25386 (divided log-probability)."""
    (drawn,) = sample(torch.tensor([[2.0, 0.0]]), [Draw(SamplingParams(temperature=0.5), 0.0)])
    assert drawn.token == 0 and drawn.logprob == pytest.approx(-0.01815, abs=1e-5)


def test_greedy_takes_the_best_and_is_certain():
    drawn = draw_many(torch.tensor([1.0, 3.0, 2.0]), 10, temperature=0.0)
    assert {d.token for d in drawn} == {1} and {d.logprob for d in drawn} == {0.0}
    assert drawn[0].kept.tolist() == [1]


# logits ln([.5, .25, .15, .1])
FOUR = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (dict(top_k=2), [0, 1]),
        (dict(top_k=9), [0, 1, 2, 3]),
        (dict(top_p=0.49), [0]),
        (dict(top_p=0.51), [0, 1]),
        (dict(top_p=0.76), [0, 1, 2]),
        (dict(min_p=0.29), [0, 1, 2]),
        (dict(min_p=0.31), [0, 1]),
        (dict(top_k=3, top_p=0.83), [0, 1]),  # of [.555, .277, .166]: the first two hold .833
        (dict(top_k=3, top_p=0.84), [0, 1, 2]),
        (dict(top_k=3, min_p=0.4), [0, 1]),
        (dict(top_p=1e-9), [0]),
    ],
)
def test_truncation_keeps_by_hand_computed_sets_and_renormalises(params, kept):
    drawn = draw_many(FOUR, 200, **params)
    total = sum(math.exp(FOUR[i]) for i in kept)
    assert {d.token for d in drawn} == set(kept)
    for d in drawn:
        assert d.kept.tolist() == kept
        assert d.logprob == pytest.approx(float(FOUR[d.token]) - math.log(total), abs=1e-6)


def test_truncation_agrees_with_the_warpers_of_transformers():
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(1)
    logits = 3 * torch.randn(6, 3000)
    for params, warpers in [
        (dict(top_p=0.8), [TopPLogitsWarper(0.8)]),
        (dict(top_p=0.999), [TopPLogitsWarper(0.999)]),
        (dict(top_k=50), [TopKLogitsWarper(50)]),
        (
            dict(top_k=900, top_p=0.95, min_p=0.001),
            [TopKLogitsWarper(900), TopPLogitsWarper(0.95), MinPLogitsWarper(0.001)],
        ),
        (dict(min_p=1e-6), [MinPLogitsWarper(1e-6)]),
    ]:
        warped = logits.clone()
        for warper in warpers:
            warped = warper(None, warped)
        drawn = sample(logits, [Draw(SamplingParams(**params), 0.3, record=True) for _ in range(6)])
        for row, d in enumerate(drawn):
            expected = torch.nonzero(torch.isfinite(warped[row])).flatten().tolist()
            # They add up from the small end in 32 bits: one token on the border may fall to either side.
            assert len(set(d.kept.tolist()) ^ set(expected)) <= 2
            assert d.logprob == pytest.approx(float(warped[row].log_softmax(-1)[d.token]), abs=1e-5)


@pytest.mark.parametrize("params", [{}, dict(top_k=7), dict(top_p=0.9), dict(min_p=0.05), dict(top_k=40, top_p=0.7)])
def test_a_token_outside_the_kept_set_never_comes(params):
    torch.manual_seed(2)
    logits = 4 * torch.randn(64, 1000)
    logits[:, 500:] = float("-inf")
    edges = [0.0, ALMOST_ONE, 0.5, 1e-300]
    for uniform in (*edges, *(counter_uniform(3, i) for i in range(12))):
        for row, d in enumerate(sample(logits, [Draw(SamplingParams(**params), uniform, record=bool(params))] * 64)):
            assert torch.isfinite(logits[row, d.token])
            assert not params or d.token in d.kept


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-60, 60), min_size=1, max_size=300),
    uniform=st.sampled_from([0.0, ALMOST_ONE, 0.25, 0.999999]),
    top_k=st.integers(0, 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.2]),
    temperature=st.floats(0.05, 5.0),
)
def test_any_logits_give_a_token_that_could_come(values, uniform, top_k, top_p, min_p, temperature):
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    (d,) = sample(torch.tensor([values]), [Draw(params, uniform, record=True)])
    assert d.token in d.kept and math.isfinite(d.logprob) and d.logprob <= 0.0
    scaled = torch.tensor(values, dtype=torch.float64)[d.kept] / temperature
    assert d.logprob == pytest.approx(
        float(scaled.log_softmax(-1)[d.kept.tolist().index(d.token)]), abs=2e-4 * max(1, 60 / temperature)
    )


def test_banned_ids_do_not_come_and_the_rest_is_renormalised():
    (d,) = sample(FOUR[None], [Draw(SamplingParams(), 0.0, banned=(0, 2), record=True)])
    assert d.token == 1 and d.kept.tolist() == [1, 3]
    assert d.logprob == pytest.approx(math.log(0.25 / 0.35), abs=1e-6)
    (d,) = sample(FOUR[None], [Draw(SamplingParams(temperature=0.0), 0.0, banned=(0,))])
    assert d.token == 1


def test_rows_of_every_kind_go_together():
    rows = FOUR[None].expand(4, -1)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(temperature=2.0),
    ]
    got = sample(rows, [Draw(params, 0.9) for params in kinds])
    assert [d.token for d in got] == [0, 3, 0, 3]
    assert got[2].logprob == 0.0


@pytest.mark.parametrize("params", [{}, dict(temperature=0.0), dict(top_p=0.5)])
def test_logits_that_are_not_finite_are_told_apart(params):
    rows = torch.stack([FOUR, torch.full((4,), float("nan")), FOUR])
    got = sample(rows, [Draw(SamplingParams(**params), 0.1)] * 3)
    assert got[1] is None and got[0] == got[2] is not None


def test_random_numbers_are_even_and_depend_on_seed_and_position_alone():
    numbers = np.array([counter_uniform(seed, at) for seed in range(40) for at in range(500)])
    assert counter_uniform(5, 9) == counter_uniform(5, 9) != counter_uniform(9, 5)
    assert numbers.min() >= 0 and numbers.max() < 1 and len(set(numbers.tolist())) == numbers.size
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 100  # chi-square, 49 degrees: 1 in 40,000 beyond
    table = numbers.reshape(40, 500)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, dict(top_k=20), dict(top_p=0.8), dict(min_p=0.1)])
def test_ten_million_draws_stay_inside(params):
    torch.manual_seed(3)
    logits = 3 * torch.randn(2500, 300)
    drawn = 0
    warped = None
    while drawn < 10_000_000 // (1 if not params else 50):
        got = sample(
            logits,
            [Draw(SamplingParams(**params), counter_uniform(drawn, i), record=bool(params)) for i in range(2500)],
        )
        warped = warped or [set(d.kept.tolist()) for d in got] if params else None
        assert all(
            d is not None and (not params or d.token in kept) for d, kept in zip(got, warped or got, strict=True)
        )
        drawn += 2500
