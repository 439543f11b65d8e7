"""The report of finished, killed, empty and damaged runs, and a page that needs nothing from elsewhere."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from synthetic import Delays, flow_events, write_run

from headrace.errors import RunDirError
from headrace.observability.charts import Series, line_chart, number, stack_chart, ticks
from headrace.observability.report import build_report, report, step_times_from_events


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(
        tmp_path_factory.mktemp("runs") / "sums", Delays(generate_s=2.6, train_s=1.9, score_s=0.3), steps=30
    )


class Balanced(HTMLParser):
    VOID = {"meta", "br", "line", "circle", "rect", "path"}

    def __init__(self):
        super().__init__()
        self.open, self.links, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in self.VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(folder, tmp_path):
    path = build_report(folder).write_html(tmp_path / "page.html")
    text = path.read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert parser.links == [] and not re.search(r"@import|url\(", text), "nothing comes from elsewhere"
    assert len(text) < 5e6 and ">nan<" not in text.lower() and "Infinity" not in text
    return text


def test_text_names_figures_and_bottleneck(run):
    text = str(build_report(run).text(100))
    for words in ("sums: finished, 30 steps", "reward", "held-out, greedy", "samples/s", "lag", "log-prob difference",
                  "p99", "stood still", "trained", "idle", "bottleneck", "generation is"):  # fmt: skip
        assert words in text, words
    assert max(len(line) for line in text.splitlines()) <= 100
    assert build_report(run).text(30)


def test_page_holds_every_chart_and_is_self_contained(run, tmp_path):
    text = page_of(run, tmp_path)
    for title in ("Reward", "Rollout against trainer", "Completion length", "Lag of what was trained on", "Samples a second",
                  "Where each step's seconds go", "Who worked when", "What became of the units", "Drop rate by length"):  # fmt: skip
        assert f"<h3>{title.replace(chr(39), '&#x27;')}</h3>" in text, title
    assert "held-out, greedy" in text and "generation is the bottleneck" in text
    assert "not recorded in this run" not in text


def test_report_prints_and_writes_beside_the_run(run, capsys):
    built = report(run)
    assert "generation is the bottleneck" in re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert (built.folder / "report.html").is_file()


def test_values_are_read_as_written(run):
    built = build_report(run)
    assert built.steps() == list(range(1, 31)) and built.trained == 240
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert built.column("reward/mean") == [row["reward/mean"] for row in rows]
    assert built.mean("reward/mean", last=5) == pytest.approx(sum(row["reward/mean"] for row in rows[-5:]) / 5)
    assert built.dropped["lag"] == rows[-1]["drops/lag"]
    assert min(built.samples) == 1 and max(built.samples) == 30
    times = built.step_times()
    for i, row in enumerate(rows):
        assert sum(part[i] for part in times.values() if part[i] == part[i]) == pytest.approx(row["time/step_s"])


@pytest.mark.parametrize(
    "gone", ["metrics.jsonl", "events.jsonl", "run.json", "config.toml", "evaluation.jsonl", "samples", "timeline.json"]
)
def test_any_file_may_be_absent(run, tmp_path, gone):
    folder = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(folder / gone) if gone == "samples" else (folder / gone).unlink()
    assert build_report(folder).text()
    page_of(folder, tmp_path)


def test_a_killed_run_with_torn_and_damaged_files(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "copy")
    for name in ("metrics.jsonl", "events.jsonl", "evaluation.jsonl"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(b'\n[]\n"x"\n{"step": "?"}\n{"step": null}\n' + whole[: len(whole) * 2 // 3])
    (folder / "run.json").write_text('{"state": "runn')
    (folder / "config.toml").write_text("= nonsense")
    next((folder / "samples").glob("*.jsonl")).write_text('{"torn": ')
    built = build_report(folder)
    assert built.state == "unknown" and 10 < len(built.rows) < 30 and built.verdict.part == "engine"
    page_of(folder, tmp_path)


def test_a_resumed_runs_time_is_that_of_all_its_parts_and_what_was_left_over_is_no_waste(tmp_path):
    rows = [{"step": step, "time/elapsed_s": at} for step, at in ((1, 10.0), (2, 21.0), (2, 5.0), (3, 9.0), (4, 4.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text('{"elapsed_s": 6.5, "counts": {"trained": 8}}')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time/elapsed_s": 6.0, "drops/end": 8, "drops/stopped": 8, "drops/stale": 2}\n')
    built = build_report(tmp_path)
    assert built.elapsed_s == 21.0 + 9.0 + 6.5
    assert built.dropped_share == pytest.approx(0.2) and built.dropped["end"] == 8


def test_a_run_with_no_step(tmp_path):
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "config.json").write_text('{"name": "young"}')
    built = build_report(folder)
    assert built.verdict.part == "unknown" and "young: unknown, 0 steps" in str(built.text())
    assert "not recorded in this run" in page_of(folder, tmp_path)


def test_one_step_and_text_that_looks_like_html(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "run.json").write_text('{"state": "<b>", "elapsed_s": 3}')
    (folder / "metrics.jsonl").write_text(
        '{"step":1,"reward/mean":0.5,"length/p50":0,"time/step_s":2,"rate/samples_per_s":null}\n'
    )
    (folder / "samples").mkdir()
    (folder / "samples" / "step_000001.jsonl").write_text(
        '{"prompt":"<script>alert(1)</script>","completion":"","reward":null}\n'
    )
    text = page_of(folder, tmp_path)
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text and "0:03" in text


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunDirError, match="not a run folder"):
        build_report(tmp_path)
    with pytest.raises(RunDirError, match="no such run folder"):
        build_report(tmp_path / "absent")


def test_step_times_come_from_events_when_metrics_lack_them():
    events = flow_events(Delays(generate_s=2.0, train_s=1.0, publish_s=0.1), steps=6)
    times = step_times_from_events(events, [1, 2, 3, 4, 5, 6, 7])
    assert times["forward_backward"][:6] == pytest.approx([0.9] * 6)
    assert times["optimizer_step"][:6] == pytest.approx([0.1] * 6)
    assert times["publish"][:6] == pytest.approx([0.1] * 6)
    assert times["wait_batch"][3] == pytest.approx(1.0, abs=0.3)
    assert times["wait_batch"][6] != times["wait_batch"][6], "a step without events is unknown, not zero"
    assert step_times_from_events([], [1]) == {}


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.13, 0.84), (0, 0), (5, 5), (-3, 2), (1e-9, 2e-9), (0, 1e7), (0, float("inf"))]
)
def test_ticks_are_few_and_span_the_data(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 9 and found == sorted(set(found))
    if high < float("inf"):
        assert found[0] <= low and found[-1] >= high


def test_numbers_are_short():
    assert [number(v) for v in (0, 0.25, 1234.6, 15000, 3e-5, 2.5e6, float("nan"))] == [
        "0", "0.25", "1235", "15k", "3e-5", "2.5M", "–",
    ]  # fmt: skip


def test_charts_of_degenerate_data():
    nan = float("nan")
    assert "not recorded" in line_chart([Series(name="a", xs=[1, 2], ys=[nan, nan], colour="red")], "y")
    assert "<circle" in line_chart([Series(name="a", xs=[1], ys=[0.0], colour="red")], "y")
    assert "not recorded" in line_chart([Series(name="a", xs=[1, 2], ys=[0, -1], colour="red")], "y", log=True)
    assert "<svg" in line_chart([Series(name="a", xs=[1, 2, 3], ys=[1e-12, 0, 1], colour="red")], "y", log=True)
    assert "not recorded" in stack_chart([1.0, 2.0], {"a": ("red", [0.0, nan])}, "y")
    long = line_chart([Series(name="a", xs=range(100_000), ys=[0.5] * 100_000, colour="red")], "y")
    assert len(long) < 60_000, "a long run draws few points"
