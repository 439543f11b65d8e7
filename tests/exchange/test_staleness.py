"""Room and age: what the formulas give for numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.exchange.config import BufferConfig, StalenessConfig, steps_ahead
from headrace.exchange.staleness import Capacity, VersionLine, is_stale
from headrace.types import NO_VERSION


@pytest.mark.parametrize(
    "depth, most, ahead",
    [
        ("none", None, 0),
        ("double", None, 1),
        ("queue", None, 3),
        ("stream", None, None),
        ("stream", 2, 2),
        ("queue", 1, 1),
        ("double", 5, 1),
        ("none", 4, 0),
    ],
)
def test_the_tightest_bound_on_steps_ahead_holds(depth, most, ahead):
    assert steps_ahead(BufferConfig(depth=depth, steps=3), StalenessConfig(max_steps_ahead=most)) == ahead


@pytest.mark.parametrize(
    "ahead, oversample, max_in_flight, running, held, room",
    [
        (0, 0, 0, 0, 0, 4),
        (0, 0, 0, 2, 4, 0),
        (1, 0, 0, 3, 5, 3),
        (1, 2, 0, 3, 5, 5),
        (1, 0, 4, 3, 5, 1),
        (2, 0, 0, 0, 0, 12),
        (None, 0, 0, 3, 50, 5),
        (None, 0, 6, 3, 50, 3),
        (1, 0, 0, 0, 20, 0),
    ],
)
def test_room(ahead, oversample, max_in_flight, running, held, room):
    capacity = Capacity(batch=4, ahead=ahead, oversample=oversample, max_in_flight=max_in_flight)
    assert capacity.room(running=running, held=held) == room


def test_lag_counts_trained_batches():
    line = VersionLine()
    for _ in range(6):
        line.advance()
    assert [line.lag(version) for version in (6, 5, 3, 0)] == [0, 1, 3, 6]
    assert line.lag(NO_VERSION) == 0
    assert line.lag(7) == 0, "an engine may be ahead of what the trainer has taken stock of"


def test_numbers_skipped_by_a_restore_are_no_lag_and_lost_ones_are_older():
    line = VersionLine(version=5)
    line.restore(highest_written=8)
    assert line.version == 9, "a number never names two contents"
    assert line.lag(9) == 0
    assert line.lag(5) == 0, "9 holds what 5 held"
    assert line.lag(4) == 1
    assert line.lag(7) == 1, "6 to 8 were weights that are lost"
    line.advance()
    assert [line.lag(version) for version in (10, 9, 5, 4, 8)] == [0, 1, 1, 2, 2]
    line.restore(highest_written=10)
    assert line.version == 11 and line.lag(10) == 0 and line.lag(5) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4))
def test_over_any_restores_lag_is_the_number_of_batches_trained_since(history):
    line, trained = VersionLine(), 0
    contents = {0: 0}
    for steps, lost in history:
        for _ in range(steps):
            trained += 1
            contents[line.advance()] = trained
        line.restore(line.version + lost)
        contents[line.version] = trained
        for version, at in contents.items():
            assert line.lag(version) == trained - at


@pytest.mark.parametrize("lag, most, stale", [(2, 2, False), (3, 2, True), (9, None, False), (1, 0, True)])
def test_stale_is_above_the_limit(lag, most, stale):
    assert is_stale(lag, most) is stale
