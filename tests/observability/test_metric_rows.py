"""Statistics and units into rows of floats, against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import group

from headrace.observability.metrics import (
    DropTally,
    batch_metrics,
    bucket_order,
    flatten,
    lag_histogram,
    lag_metrics,
    length_bucket,
    percentile,
)
from headrace.types import Stat


def test_a_name_that_ends_in_max_takes_the_largest_value_and_any_other_the_mean():
    stat = Stat(6.0, 4.0, 3.0)
    row = flatten({"a/mean": stat, "a/diff_max": stat, "a/max": stat, "b": 2, "empty_max": Stat(0.0, 0.0)})
    assert row == {"a/mean": 1.5, "a/diff_max": 3.0, "a/max": 3.0, "b": 2.0, "empty_max": 0.0}


@pytest.mark.parametrize(
    ("values", "q", "expected"), [([], 50, 0.0), ([3], 99, 3.0), ([1, 2, 3, 4], 50, 2.5), ([1, math.nan, 3], 50, 2.0)]
)
def test_percentile(values, q, expected):
    assert percentile(values, q) == expected


def test_batch_metrics_of_two_groups():
    groups = [
        group("a", [1.0, 0.0], [[3, 3, 4], [4]]),
        group("b", [1.0, 1.0], [[5, 5], [5, 5]], finish="length"),
    ]
    row = batch_metrics(groups, version=5)
    assert row["reward/mean"] == 0.75
    assert row["reward/std"] == pytest.approx(math.sqrt(0.1875))
    assert row["group/zero_variance_share"] == 0.5
    assert row["lag/mean"] == 1.0 and row["lag/max"] == 2.0
    assert row["lag/hist/0"] == 1.0 and row["lag/hist/2"] == 1.0
    assert row["length/mean"] == 2.0 and row["length/p50"] == 2.0 and row["length/max"] == 3.0
    assert row["finish/stop"] == 0.5 and row["finish/length"] == 0.5 and row["length/truncated_share"] == 0.5
    assert row["reward/part/exact"] == 0.75


def test_missing_rewards_are_left_out_of_the_mean_and_counted():
    row = batch_metrics([group("a", [1.0, 1.0, None, 1.0, math.nan], [[0]] * 5)], version=0)
    assert row["reward/mean"] == 1.0 and row["reward/std"] == 0.0
    assert row["reward/missing_share"] == pytest.approx(0.4)
    assert row["group/zero_variance_share"] == 1.0


@pytest.mark.parametrize(
    "groups", [[], [group("a", [], [])], [group("a", [None], [[]])]], ids=["none", "empty", "unsampled"]
)
def test_degenerate_batches_give_finite_rows(groups):
    assert all(math.isfinite(value) for value in batch_metrics(groups, version=3).values())


def test_lag_histogram_sums_rows_in_order():
    rows = [lag_metrics([0, 2, 2, 10]), lag_metrics([1, 2, 99]), {"lag/hist/2": None}, {}]
    assert lag_histogram(rows) == {"0": 1, "1": 1, "2": 3, "10": 1, "16+": 1}


@given(st.integers(0, 10**6))
def test_a_length_lies_in_its_bucket(length):
    low, high = map(int, length_bucket(length).split("-"))
    assert low <= length <= high


def test_drop_rate_by_length_shows_the_bias():
    tally = DropTally()
    tally.trained([3, 5, 20, 40])
    tally.dropped("lag", [40, 50, 60])
    tally.dropped("lag", [20])
    tally.dropped("retries")
    row = tally.row()
    assert row["drops/lag"] == 2.0 and row["drops/retries"] == 1.0
    assert row["drops/by_length/0-15"] == 0.0
    assert row["drops/by_length/16-31"] == 0.5
    assert row["drops/by_length/32-63"] == 0.75
    assert row["drops/seen_by_length/32-63"] == 4.0
    again = DropTally()
    again.restore(tally.state())
    assert again.row() == row
    assert sorted(["128-255", "0-15", "16-31"], key=bucket_order) == ["0-15", "16-31", "128-255"]
    assert DropTally().row() == {}
