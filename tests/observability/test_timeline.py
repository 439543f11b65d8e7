"""Events to disk and back, torn lines, and a trace whose slices nest."""

import json

from synthetic import Delays, flow_events

from headrace.observability.timeline import Timeline, chrome_trace, read_events, write_trace
from headrace.types import Event


def test_events_come_back_as_recorded(tmp_path):
    events = flow_events(Delays(), steps=3)
    timeline = Timeline(tmp_path)
    for event in events:
        timeline.record(event)
    timeline.close()
    timeline.close()
    assert read_events(tmp_path) == events


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_run(tmp_path):
    first, second = Event(1, "engine-0", "generate", "x", 3, 5), Event(2, "trainer", "save")
    timeline = Timeline(tmp_path)
    timeline.record(first)
    timeline.close()
    with timeline.path.open("ab") as file:
        file.write(b'[17,"engine-0","gen')
    assert read_events(tmp_path) == [first]
    resumed = Timeline(tmp_path)
    resumed.record(second)
    resumed.close()
    assert read_events(tmp_path) == [first, second]
    assert timeline.path.read_bytes().count(b"\n") == 2


def test_a_file_that_is_one_torn_line_starts_afresh(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"[1,2")
    timeline = Timeline(tmp_path)
    timeline.record(Event(1, "a", "b"))
    timeline.close()
    assert read_events(tmp_path) == [Event(1, "a", "b")]


def test_rows_that_are_no_events_are_passed_over(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"a":1}\n[1,2]\n[5,"a","b","",-1,0]\nnull\n[1,"a","b","","x",0]\n')
    assert read_events(tmp_path) == [Event(5, "a", "b")]


def test_events_older_than_a_second_are_on_disk_without_a_flush(tmp_path):
    timeline = Timeline(tmp_path)
    for second in range(4):
        timeline.record(Event(second * 1_500_000_000, "engine-0", "generate"))
    assert len(read_events(tmp_path)) >= 3
    timeline.close()


def test_trace_has_one_named_track_a_source_and_args(tmp_path):
    events = [
        Event(2_000, "engine-0", "generate", "lease-1", 4, 10_000),
        Event(3_000, "trainer", "forward_backward", "", 4, 2_000),
        Event(9_000, "controller", "live", version=5),
    ]
    write_trace(events, tmp_path / "timeline.json")
    rows = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    tracks = {row["args"]["name"]: row["tid"] for row in rows if row["name"] == "thread_name"}
    assert set(tracks) == {"engine-0", "trainer", "controller"}
    assert len(set(tracks.values())) == 3
    slice_ = next(row for row in rows if row["name"] == "generate")
    assert slice_["ph"] == "X" and slice_["ts"] == 0.0 and slice_["dur"] == 10.0
    assert slice_["args"] == {"subject": "lease-1", "version": 4} and slice_["tid"] == tracks["engine-0"]
    live = next(row for row in rows if row["name"] == "live")
    assert live["ph"] == "i" and live["ts"] == 7.0 and live["args"] == {"version": 5}


def test_slices_of_one_track_never_overlap():
    overlapping = [Event(i * 1000, "reward-0", "score", str(i), -1, 5000) for i in range(4)]
    waits = [
        Event(0, "controller", "wait_room", duration_ns=9000),
        Event(1000, "controller", "wait_batch", duration_ns=9000),
    ]
    end_of = {}
    for row in chrome_trace(overlapping + waits + flow_events(Delays(), steps=4))["traceEvents"]:
        if row["ph"] == "X":
            assert row["ts"] >= end_of.get(row["tid"], 0) - 1e-6
            end_of[row["tid"]] = row["ts"] + row["dur"]


def test_trace_of_nothing_is_valid():
    assert json.dumps(chrome_trace([]))
