"""What the recorder leaves in a run folder, for every sink, over a resume, and when a writer fails."""

import json
import math
import sys
import types

import pytest
from synthetic import decode, group

from headrace.errors import MissingExtra
from headrace.observability.config import ObservabilityConfig
from headrace.observability.recorder import RunRecorder
from headrace.observability.report import by_step
from headrace.observability.samples import sample_rows, version_runs, write_samples
from headrace.observability.sinks import open_sinks
from headrace.types import Event, Stat

JSONL = ObservabilityConfig(sinks=("jsonl",), samples_every=5)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_become_rows_of_valid_json(tmp_path):
    recorder = RunRecorder(tmp_path, JSONL)
    recorder.step(1, {"loss/ratio_max": Stat(3.0, 2.0, 2.5), "reward/mean": 0.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss/ratio_max": 2.5, "reward/mean": 0.5}]
    recorder.step(2, {"reward/mean": math.nan, "loss/kl": math.inf})
    recorder.close()
    assert lines(tmp_path / "metrics.jsonl")[1] == {"step": 2, "reward/mean": None, "loss/kl": None}


def test_a_resumed_run_appends_after_a_torn_line_and_its_rows_win(tmp_path):
    first = RunRecorder(tmp_path, JSONL)
    first.step(1, {"a": 1.0})
    first.step(2, {"a": 2.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"a"')
    second = RunRecorder(tmp_path, JSONL)
    second.step(2, {"a": 20.0})
    second.close()
    rows = lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["a"]) for row in rows] == [(1, 1.0), (2, 2.0), (2, 20.0)]
    assert by_step(rows) == [{"step": 1.0, "a": 1.0}, {"step": 2.0, "a": 20.0}]


def test_a_step_puts_the_events_before_it_on_disk_and_close_writes_the_trace(tmp_path):
    recorder = RunRecorder(tmp_path, JSONL)
    recorder.event(Event(1, "engine-0", "generate", duration_ns=4))
    recorder.step(1, {})
    assert len(lines(tmp_path / "events.jsonl")) == 1
    recorder.close()
    recorder.close()
    recorder.event(Event(2, "engine-0", "generate"))
    assert len(lines(tmp_path / "events.jsonl")) == 1
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


def test_samples_of_every_nth_step_and_the_first(tmp_path):
    recorder = RunRecorder(tmp_path, JSONL)
    for step in range(1, 11):
        recorder.samples(step, [group("g", [1.0], [[step]])], decode)
    assert sorted(p.stem for p in (tmp_path / "samples").glob("*.txt")) == ["step_000001", "step_000005", "step_000010"]
    never = RunRecorder(tmp_path / "never", ObservabilityConfig(sinks=(), samples_every=0))
    never.samples(5, [group("g", [1.0], [[1]])], decode)
    assert not (tmp_path / "never" / "samples").exists()


def test_a_writer_that_fails_is_left_out_and_the_run_goes_on(tmp_path):
    recorder = RunRecorder(tmp_path, JSONL)

    class Full:
        def write(self, step, values):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    recorder._sinks.insert(0, Full())
    recorder.step(1, {"a": 1.0})
    recorder.step(2, {"a": 2.0})

    def broken(ids):
        raise ValueError("no such token")

    recorder.samples(5, [group("g", [1.0], [[1]])], broken)
    recorder.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 2
    assert len(recorder.problems) == 2
    assert "No space left" in recorder.problems[0] and "no such token" in recorder.problems[1]


def test_readable_sample_shows_prompt_completion_parts_versions_and_end(tmp_path):
    two = group("g7", [1.0, None], [[3, 3, 4], [4]])
    path = write_samples(tmp_path, 5, [two], decode, {"g7/0": 0.707, "g7/1.0": -0.707})
    text = path.read_text()
    assert path.name == "step_000005.txt"
    assert text.count("13 + 35 = ") == 1, "a shared prompt is printed once"
    assert "reward 1 | exact 1 | advantage +0.707 | stop | 3 tokens (v3 x 2, v4 x 1)" in text
    assert "reward none | exact none | advantage -0.707 | stop | 1 tokens (v4 x 1)" in text
    assert "    abc\n" in text
    rows = lines(path.with_suffix(".jsonl"))
    assert rows[0]["prompt"] == "13 + 35 = " and rows[0]["completion"] == "abc"
    assert rows[0]["versions"] == [[3, 2], [4, 1]] and rows[1]["reward"] is None


def test_samples_without_sampled_tokens_and_with_broken_text(tmp_path):
    empty = group("g", [math.nan], [[]])
    assert version_runs(empty.episodes[0].samples[0]) == []
    assert sample_rows([empty], decode)[0]["completion"] == "" and sample_rows([empty], decode)[0]["reward"] is None
    path = write_samples(tmp_path, 1, [group("g", [0.0], [[1]])], lambda ids: "half \ud83d")
    assert "half ?" in path.read_text() and lines(path.with_suffix(".jsonl"))
    assert write_samples(tmp_path, 2, [], decode).read_text().startswith("Step 2: 0 samples")


# ------------------------------------------------------------------------------------------------------------ sinks


def test_tensorboard_scalars_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(ObservabilityConfig(sinks=("tensorboard",)), tmp_path)
    sink.write(1, {"reward/mean": 0.25, "loss/kl": math.nan})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert read.Tags()["scalars"] == ["reward/mean"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"headrace\[{name}\]"):
        open_sinks(ObservabilityConfig(sinks=("jsonl", name)), tmp_path)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_step_under_the_runs_name(tmp_path, name, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished")
    )
    fake = types.ModuleType(name)
    fake.init = lambda **arguments: calls.append(arguments) or run
    monkeypatch.setitem(sys.modules, name, fake)
    (sink,) = open_sinks(ObservabilityConfig(sinks=(name,)), tmp_path / "my-run", {"seed": 1})
    sink.write(3, {"a": 1.0})
    sink.close()
    sink.close()
    again = open_sinks(ObservabilityConfig(sinks=(name,)), tmp_path / "my-run", {"seed": 1})
    other = open_sinks(ObservabilityConfig(sinks=(name,)), tmp_path / "elsewhere" / "my-run", {"seed": 1})
    assert again and other
    key = "id" if name == "wandb" else "name"
    ids = [call[key] for call in calls if isinstance(call, dict)]
    assert ids[0] == ids[1] != ids[2], "a resumed run keeps its id, a namesake has another"
    calls = calls[:3]
    assert calls[0]["name"].startswith("my-run") and calls[0]["config"] == {"seed": 1} and calls[0]["resume"] == "allow"
    assert calls[1:] == [(3, {"a": 1.0}), "finished"]
