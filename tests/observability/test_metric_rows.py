"""Statistics, lags and drops into rows of floats, against numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observability.metrics import (
    STEP_KINDS,
    DropTally,
    WorkTally,
    bucket_order,
    flatten,
    lag_histogram,
    lag_metrics,
    length_bucket,
)
from headrace.types import Event, Stat


def test_a_name_that_ends_in_max_takes_the_largest_value_and_any_other_the_mean():
    stat = Stat(6.0, 4.0, 3.0)
    row = flatten({"a/mean": stat, "a/diff_max": stat, "a/max": stat, "b": 2, "empty_max": Stat(0.0, 0.0)})
    assert row == {"a/mean": 1.5, "a/diff_max": 3.0, "a/max": 3.0, "b": 2.0, "empty_max": 0.0}


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


def test_idle_shares_and_training_time_between_two_rows():
    tally = WorkTally()
    assert WorkTally().row(5) == {f"time/{kind}_s": 0.0 for kind in STEP_KINDS}
    for event in (
        Event(1_000, "controller", "admitted"),
        Event(1_000, "engine-0", "generate", duration_ns=600),
        Event(1_400, "engine-0", "prepare", duration_ns=400),  # beside passes: counted once
        Event(1_900, "trainer", "forward_backward", duration_ns=50),
        Event(1_950, "trainer", "forward_backward", duration_ns=50),
        Event(1_000, "controller", "wait_batch", duration_ns=900),
    ):
        tally.event(event)
    row = tally.row(2_000)
    assert row["idle/engine-0"] == pytest.approx(0.2) and row["idle/trainer"] == pytest.approx(0.9)
    assert row["time/forward_backward_s"] == pytest.approx(100e-9) and row["time/annotate_s"] == 0.0
    assert set(row) == {"idle/engine-0", "idle/trainer", *(f"time/{k}_s" for k in STEP_KINDS)}
    tally.event(Event(1_000, "trainer", "optimizer_step", duration_ns=5_000))  # came late and is longer than the window
    row = tally.row(3_000)
    assert row["idle/engine-0"] == 1.0 and row["idle/trainer"] == 0.0 and row["time/forward_backward_s"] == 0.0
