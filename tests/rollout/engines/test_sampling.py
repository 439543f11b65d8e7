"""Drawing tokens: the distribution, its truncation, its log-probabilities, its randomness and its record."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.engines.sampling import Draw, draw_plain, draw_truncated
from headrace.rollout.engines.sampling import sample as sample_in_place
from headrace.rollout.engines.sequences import counter_uniforms
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
    for uniform in (*edges, *counter_uniforms([3], range(12)).tolist()):
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
    kept = d.kept.tolist() or list(range(len(values)))
    assert d.token in kept and math.isfinite(d.logprob) and d.logprob <= 0.0
    scaled = torch.tensor(values, dtype=torch.float64)[kept] / temperature
    assert d.logprob == pytest.approx(
        float(scaled.log_softmax(-1)[kept.index(d.token)]), abs=2e-4 * max(1, 60 / temperature)
    )


@pytest.mark.parametrize("params", [dict(top_k=9), dict(top_p=0.8), dict(min_p=0.05), dict(top_k=40, top_p=0.9, min_p=0.01), dict(allowed_token_ids=tuple(range(3, 60)))])  # fmt: skip
def test_logprobs_sum_to_one_over_the_kept_set(params):
    """Each kept id's log-probability, drawn by the number in the middle of its share."""
    torch.manual_seed(5)
    logits = 3 * torch.randn(300)
    (first,) = sample(logits[None], [Draw(SamplingParams(**params), 0.5, record=True)])
    shares = logits.double()[first.kept].softmax(-1)
    middles = (shares.cumsum(0) - shares / 2).tolist()
    drawn = sample(logits.expand(len(middles), -1), [Draw(SamplingParams(**params), u, record=True) for u in middles])
    assert [d.token for d in drawn] == first.kept.tolist()
    assert math.fsum(math.exp(d.logprob) for d in drawn) == pytest.approx(1.0, abs=1e-6)


def test_noise_in_the_logits_moves_a_draw_only_across_a_bound():
    """What two computations of the same logits may differ by: rows with a number away from every bound agree."""
    torch.manual_seed(6)
    logits = 2 * torch.randn(40)
    logits[7] = logits[8] + 1e-7  # whose order by likelihood turns with the noise
    for params in (dict(), dict(top_k=12), dict(top_k=30, min_p=0.001)):
        numbers = counter_uniforms([1], range(400)).tolist()
        draws = [Draw(SamplingParams(**params), u, record=True) for u in numbers]
        one = sample(logits.expand(400, -1), draws)
        other = sample((logits + 1e-6 * torch.randn(400, 40)), draws)
        kept = one[0].kept.tolist() or list(range(40))
        bounds = logits.double()[kept].softmax(-1).cumsum(0).numpy()
        for a, b, u in zip(one, other, numbers, strict=True):
            assert a.token == b.token or np.abs(bounds - u).min() < 1e-5


def test_a_penalty_a_bias_and_a_list_change_the_logits_by_hand_computed_amounts():
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0])

    def expect(params, adjusted, **more):
        (d,) = sample(logits[None], [Draw(SamplingParams(**params), 0.0, **more)])
        assert d.logprob == pytest.approx(float(torch.tensor(adjusted).log_softmax(-1)[d.token]), abs=1e-6)
        return d.token

    assert expect(dict(repetition_penalty=2.0), [1.0, -2.0, 0.5, 0.0], seen=[0, 1, 0]) == 0
    assert expect(dict(logit_bias=((0, -3.0), (3, 1.0))), [-1.0, -1.0, 0.5, 1.0]) == 0
    inf = float("inf")
    assert expect(dict(allowed_token_ids=(1, 3)), [-inf, -1.0, -inf, 0.0]) == 1
    assert expect(dict(allowed_token_ids=(1, 3)), [-inf, -inf, -inf, 0.0], banned=(1,)) == 3
    # The penalty comes first, then the bias, then the temperature.
    both = dict(repetition_penalty=2.0, logit_bias=((0, 1.0),), temperature=0.5)
    assert expect(both, [4.0, -2.0, 1.0, 0.0], seen=[0]) == 0


def test_a_penalty_agrees_with_the_processor_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(4)
    logits, seen = 3 * torch.randn(5, 50), torch.randint(50, (5, 12))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone()).log_softmax(-1)
    draws = [Draw(SamplingParams(repetition_penalty=1.3), 0.4, seen=ids.tolist()) for ids in seen]
    for row, d in enumerate(sample(logits, draws)):
        assert d.logprob == pytest.approx(float(expected[row, d.token]), abs=1e-5)


def test_rows_wider_than_the_candidates_and_narrow_ones_go_together():
    torch.manual_seed(7)
    logits = torch.randn(4, 3000)
    logits[1] *= 20
    params = [
        SamplingParams(top_p=0.99),
        SamplingParams(top_p=0.99),
        SamplingParams(top_k=3),
        SamplingParams(min_p=1e-4),
    ]
    together = sample(logits, [Draw(one, 0.7, record=True) for one in params])
    for row, one in enumerate(params):
        (alone,) = sample(logits[row : row + 1], [Draw(one, 0.7, record=True)])
        assert (alone.token, alone.kept.tolist()) == (together[row].token, together[row].kept.tolist())
        assert alone.logprob == pytest.approx(together[row].logprob, abs=1e-6)
    assert len(together[0].kept) > 512 > len(together[1].kept)


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
    numbers = counter_uniforms(np.repeat(np.arange(40), 500), np.tile(np.arange(500), 40))
    assert counter_uniforms([5], [9]) == counter_uniforms([5, 1], [9, 1])[0] != counter_uniforms([9], [5])
    assert numbers.min() >= 0 and numbers.max() < 1 and len(set(numbers.tolist())) == numbers.size
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 100  # chi-square, 49 degrees: 1 in 40,000 beyond
    table = numbers.reshape(40, 500)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def draws_stay_inside(count):
    """`count` draws of 96 rows under 12 settings, against kept sets that numpy computed on its own."""
    rng = np.random.default_rng(3)
    logits = (3 * rng.standard_normal((96, 48))).astype(np.float32)
    logits[:, 40:44] = -np.inf
    settings_ = [(k, p, m) for k in (0, 1, 7) for p in (1.0, 0.8) for m in (0.0, 0.1)]
    top_k, top_p, min_p = (np.array(column)[np.arange(96) % 12] for column in zip(*settings_, strict=True))
    allowed = np.zeros((96, 48), bool)
    for row in range(96):
        order = np.argsort(-logits[row].astype(np.float64))
        shares = np.exp(logits[row].astype(np.float64))[order]
        if top_k[row]:
            shares[top_k[row] :] = 0
        shares /= shares.sum()
        keep = (shares > 0) & (shares.cumsum() - shares < top_p[row]) & (shares >= min_p[row] * shares[0])
        allowed[row, order[keep]] = True
    allowed, repeats = torch.from_numpy(allowed), 40
    rows = torch.arange(96).repeat(repeats)
    many = torch.from_numpy(logits)[rows]
    options = dict(
        top_k=torch.from_numpy(top_k)[rows], top_p=torch.from_numpy(top_p)[rows], min_p=torch.from_numpy(min_p)[rows]
    )
    wide = 3 * torch.randn(96, 700, generator=torch.Generator().manual_seed(3))
    wide[:, 250:262] = wide[:, 690:] = float("-inf")
    hits = torch.zeros(96, 48, dtype=torch.int64)
    for start in range(0, count, len(rows)):
        uniforms = torch.from_numpy(np.random.default_rng(start).random(len(rows)))
        uniforms[:2] = torch.tensor([0.0, ALMOST_ONE])
        got = draw_truncated(many, uniforms, **options)
        assert bool(allowed[rows, got.tokens].all()) and bool((got.counts == allowed.sum(-1)[rows]).all())
        hits.index_put_((rows, got.tokens), torch.ones_like(rows), accumulate=True)
        # Without truncation: no id that was ruled out, at the borders of its blocks and at the end of the vocabulary.
        plain = draw_plain(wide[rows[: len(rows) // 10]], uniforms[: len(rows) // 10])
        assert not bool((((plain.tokens >= 250) & (plain.tokens < 262)) | (plain.tokens >= 690)).any())
    # And every id that is likely enough does come.
    assert bool(((hits > 0) | ~allowed | (torch.from_numpy(logits).log_softmax(-1) < -6)).all())


def test_draws_stay_inside():
    draws_stay_inside(100_000)


@pytest.mark.slow
def test_ten_million_draws_stay_inside():
    draws_stay_inside(10_000_000)
