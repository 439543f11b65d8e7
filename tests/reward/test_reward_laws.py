"""Laws of the weighted sum, over drawn parts and weights."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.reward.combine import Failure, combine, weighted_sum

numbers = st.floats(-1e6, 1e6)
names = st.text("abcdef", min_size=1, max_size=3)
parts_and_weights = st.dictionaries(names, st.tuples(st.none() | numbers, numbers), min_size=1, max_size=6)


def split(drawn):
    return {name: part for name, (part, _) in drawn.items()}, {name: weight for name, (_, weight) in drawn.items()}


def close(a, b, scale):
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9 * (1.0 + scale))


def size(parts, weights):
    return sum(abs(weights[name] * part) for name, part in parts.items() if part is not None)


@given(parts_and_weights)
def test_none_exactly_when_every_part_is_none(drawn):
    parts, weights = split(drawn)
    assert (weighted_sum(parts, weights) is None) == all(part is None for part in parts.values())


@given(parts_and_weights, st.randoms())
def test_the_order_of_the_parts_does_not_matter(drawn, random):
    parts, weights = split(drawn)
    shuffled = list(parts.items())
    random.shuffle(shuffled)
    assert weighted_sum(dict(shuffled), weights) == weighted_sum(parts, weights)


@given(parts_and_weights)
def test_a_none_part_counts_as_if_it_were_not_there(drawn):
    parts, weights = split(drawn)
    present = {name: part for name, part in parts.items() if part is not None}
    assert weighted_sum(parts, weights) == weighted_sum(present, weights)


@given(parts_and_weights, numbers)
def test_weight_zero_changes_nothing(drawn, part):
    parts, weights = split(drawn)
    assume(any(value is not None for value in parts.values()))
    more = weighted_sum(parts | {"extra part": part}, weights | {"extra part": 0.0})
    assert more == weighted_sum(parts, weights)


@given(parts_and_weights, st.floats(-100, 100))
def test_scaling_the_weights_scales_the_sum(drawn, factor):
    parts, weights = split(drawn)
    assume(any(value is not None for value in parts.values()))
    scaled = weighted_sum(parts, {name: factor * weight for name, weight in weights.items()})
    assert close(scaled, factor * weighted_sum(parts, weights), size(parts, weights) * abs(factor))


@given(st.dictionaries(names, st.tuples(numbers, numbers, numbers), min_size=1, max_size=6))
def test_the_sum_of_two_sets_of_parts_is_the_sum_of_their_sums(drawn):
    first = {name: a for name, (a, _, _) in drawn.items()}
    second = {name: b for name, (_, b, _) in drawn.items()}
    weights = {name: weight for name, (_, _, weight) in drawn.items()}
    both = weighted_sum({name: first[name] + second[name] for name in first}, weights)
    apart = weighted_sum(first, weights) + weighted_sum(second, weights)
    assert close(both, apart, size(first, weights) + size(second, weights))


@given(names, numbers, numbers)
def test_one_part_is_its_value_times_its_weight(name, part, weight):
    assert weighted_sum({name: part}, {name: weight}) == part * weight


anything = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.builds(Failure, st.text(max_size=5))


@given(
    st.dictionaries(
        names, st.tuples(anything, st.floats(allow_nan=False, allow_infinity=False)), min_size=1, max_size=5
    ),
    st.sampled_from(["exclude", "zero"]),
)
def test_a_score_is_finite_or_none_and_fails_exactly_when_it_must(drawn, on_error):
    parts, weights = split(drawn)
    score = combine(parts, weights, on_error)
    assert score.reward is None or math.isfinite(score.reward)
    assert list(score.parts) == list(parts)
    assert all(value is None or math.isfinite(value) for value in score.parts.values())
    if any(isinstance(part, Failure) for part in parts.values()):
        assert score.error is not None
    if score.error is not None:
        assert score.reward == (None if on_error == "exclude" else 0.0)
    else:
        assert (score.reward is None) == all(part is None for part in parts.values())
