"""Who worked when, against intervals worked out by hand."""

from hypothesis import given
from hypothesis import strategies as st
from synthetic import Delays, flow_events

from headrace.observability.activity import (
    busy_share,
    flow_window,
    idle_shares,
    intersect,
    merge,
    overlap_share,
    sessions,
    span,
    stitch,
    subtract,
    total_ns,
    wait_seconds,
)
from headrace.types import Event

S = 1_000_000_000


def event(source, kind, start_s, length_s, **more):
    return Event(int(start_s * S), source, kind, duration_ns=int(length_s * S), **more)


def test_merge_joins_what_touches_and_drops_what_is_empty():
    assert merge([(5, 9), (0, 2), (2, 3), (4, 4), (6, 7)]) == [(0, 3), (5, 9)]


def test_subtract_leaves_the_gaps():
    assert subtract([(0, 10), (20, 30)], [(2, 3), (8, 22), (25, 26)]) == [(0, 2), (3, 8), (22, 25), (26, 30)]


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12).map(merge)


@given(intervals, intervals)
def test_interval_sets_agree_with_sets_of_instants(a, b):
    points_a = {t for start, end in a for t in range(start, end)}
    points_b = {t for start, end in b for t in range(start, end)}
    assert {t for s, e in intersect(a, b) for t in range(s, e)} == points_a & points_b
    assert {t for s, e in subtract(a, b) for t in range(s, e)} == points_a - points_b
    assert total_ns(intersect(a, b)) == len(points_a & points_b)


def test_overlap_is_the_share_of_bs_busy_time_under_a():
    events = [
        event("engine-0", "generate", 0, 4),
        event("engine-1", "generate", 3, 3),
        event("trainer", "forward_backward", 5, 2),
        event("trainer", "optimizer_step", 7, 2),
        event("controller", "wait_batch", 0, 5),
    ]
    assert overlap_share(events, "engine", "trainer") == 0.25
    assert overlap_share(events, "engine-0", "trainer") == 0.0
    assert overlap_share(events, "trainer", "engine-1") == 1 / 3
    assert busy_share(events, "engine", (0, 8 * S)) == 0.75
    assert idle_shares(events, (0, 10 * S)) == {"engine-0": 0.6, "engine-1": 0.7, "trainer": 0.6}
    assert wait_seconds(events)["wait_batch"] == 5.0


def test_a_wait_is_not_work():
    events = [event("trainer", "wait_batch", 0, 5), event("engine-0", "generate", 0, 5)]
    assert busy_share(events, "trainer") == 0.0
    assert overlap_share(events, "engine", "trainer") == 0.0


def test_no_events_and_an_empty_window_give_zero():
    assert span([]) == (0, 0)
    assert busy_share([], "engine") == 0.0
    assert overlap_share([], "engine", "trainer") == 0.0
    assert busy_share([event("engine-0", "generate", 0, 5)], "engine", (3, 3)) == 0.0
    assert idle_shares([]) == {}


def test_flow_window_leaves_loading_and_final_evaluation_out():
    events = [
        event("engine-0", "generate", 0, 5),
        event("controller", "admitted", 6, 0),
        event("controller", "trained", 20, 0),
        event("engine-0", "generate", 21, 9),
    ]
    assert flow_window(events) == (6 * S, 20 * S)


def test_overlapping_flow_overlaps_and_alternating_flow_does_not():
    both = flow_events(Delays(generate_s=1.0, train_s=1.0, ahead=1))
    alternating = flow_events(Delays(generate_s=1.0, train_s=1.0, ahead=0))
    assert overlap_share(both, "engine", "trainer") > 0.5
    assert overlap_share(alternating, "engine", "trainer") == 0.0


def test_stitch_takes_out_the_time_between_a_kill_and_its_resume():
    first = [event("engine-0", "generate", 100, 5), event("controller", "wait_batch", 105, 30)]
    second = [event("trainer", "save", 500, 5)]
    rebooted = [event("engine-0", "generate", 3, 5)]
    assert [len(part) for part in sessions(first + second + rebooted)] == [2, 1, 1]
    stitched = stitch(first + second + rebooted)
    assert [e.time_ns // S for e in stitched] == [0, 5, 35, 40]
    assert busy_share(stitched, "engine") == 10 / 45


def test_late_delivery_is_no_new_session():
    events = [
        event("engine-0", "generate", 10, 5),
        event("reward-0", "score", 9, 1),
        event("engine-0", "generate", 15, 1),
    ]
    assert len(sessions(events)) == 1
