"""Turns a run folder, finished or not, into a report: figures and the bottleneck for the terminal, charts for report.html."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.errors import RunDirError
from headrace.observability.activity import (
    busy_intervals,
    clip,
    flow_window,
    idle_shares,
    stitch,
    total_ns,
    wait_intervals,
)
from headrace.observability.bottleneck import Verdict, find_bottleneck
from headrace.observability.charts import number
from headrace.observability.display import Terminal, clock, sparkline
from headrace.observability.jsonl import read_jsonl
from headrace.observability.samples import SAMPLES_FOLDER
from headrace.observability.sinks.jsonl import METRICS_FILE
from headrace.observability.timeline import EVENTS_FILE, read_events
from headrace.types import Event

REPORT_FILE = "report.html"
RUN_FILES = ("run.json", METRICS_FILE, EVENTS_FILE, "config.toml", "config.json")

STEP_PARTS = {
    "waiting for a batch": ("wait_batch", "time/wait_batch_s"),
    "annotate": ("annotate", "time/annotate_s"),
    "forward + backward": ("forward_backward", "time/forward_backward_s"),
    "optimizer": ("optimizer_step", "time/optimizer_step_s"),
    "publish": ("publish", "time/publish_s"),
    "waiting for the last sync": ("wait_sync", "time/wait_sync_s"),
    "save": ("save", "time/save_s"),
}
"""Where a step's seconds go: name -> (event kind, metric), the metric before the events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run folder says. `rows` are one dict of floats a step, in order; `events` are stitched and start at 0."""

    folder: Path
    name: str
    state: str
    config: dict[str, Any]
    run: dict[str, Any]
    rows: list[dict[str, float]]
    evaluation: list[dict[str, float]]
    events: list[Event]
    verdict: Verdict
    dropped: dict[str, int]
    trained: int
    elapsed_s: float | None = None
    """Of all parts of a run that was resumed."""
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """First and last recorded step -> rows of its samples."""

    # ----------------------------------------------------------------------------------------------- reading it

    @property
    def control(self) -> bool:
        """Whether a policy acted in environments, rather than a language model in tasks."""
        env = self.config.get("env")
        return isinstance(env, dict) and bool(env.get("id"))

    @property
    def names(self) -> tuple[str, str, str]:
        """Attempts, their parts, units."""
        return ("episodes", "steps", "trajectories") if self.control else ("samples", "tokens", "groups")

    def steps(self) -> list[float]:
        return [row["step"] for row in self.rows]

    def column(self, name: str) -> list[float]:
        """The metric's values; NaN where a row lacks it."""
        return [row.get(name, math.nan) for row in self.rows]

    def last(self, name: str) -> float | None:
        return next((row[name] for row in reversed(self.rows) if name in row), None)

    def mean(self, name: str, first: int | None = None, last: int | None = None) -> float | None:
        """Mean of a column, over the first or last so many of its values."""
        values = [row[name] for row in self.rows if name in row]
        values = values[:first] if first else values[-last:] if last else values
        return sum(values) / len(values) if values else None

    @property
    def dropped_share(self) -> float:
        return dropped_share(self.dropped, self.trained)

    def step_times(self) -> dict[str, list[float]]:
        """Name of the part of a step -> seconds at each step, from metrics or, where they lack it, from events."""
        from_events = step_times_from_events(self.events, [int(step) for step in self.steps()])
        times: dict[str, list[float]] = {}
        for name, (kind, metric) in STEP_PARTS.items():
            column = self.column(metric)
            times[name] = from_events.get(kind, column) if all(map(math.isnan, column)) else column
        whole = self.column("time/step_s")
        known = [sum(v for v in at if math.isfinite(v)) for at in zip(*times.values(), strict=True)]
        times["other"] = [max(0.0, w - k) if math.isfinite(w) else math.nan for w, k in zip(whole, known, strict=True)]
        return times

    # -------------------------------------------------------------------------------------------------- output

    def text(self, width: int = 100) -> Text:
        """For the terminal. `str()` of it is plain."""
        file = StringIO()
        console = Console(file=file, width=width, force_terminal=True, color_system="standard", highlight=False)
        console.print(_picture(self, width))
        return Text.from_ansi(file.getvalue())

    def write_html(self, path: Path) -> Path:
        """One self-contained file: no script, font or style comes from elsewhere."""
        from headrace.observability.page import render_page

        path.write_text(render_page(self), encoding="utf-8", errors="replace")
        return path


def report(folder: Path, console: Console | None = None) -> Report:
    """Print the report of a run and write its report.html."""
    built = build_report(folder)
    console = console or Terminal(highlight=False)
    console.print(built.text(min(120, console.width)))
    path = built.write_html(built.folder / REPORT_FILE)
    console.print(Text(f"charts: {path}"), soft_wrap=True)
    return built


def build_report(folder: Path) -> Report:
    """Read a run folder leniently: every file may be absent, torn or empty, but it must be a run's folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunDirError(f"{folder}: no such run folder")
    if not any((folder / name).exists() for name in RUN_FILES):
        raise RunDirError(f"{folder}: not a run folder (it holds none of {', '.join(RUN_FILES)})")
    config = _read_config(folder)
    run = _read_dict(folder / "run.json")
    written = read_jsonl(folder / METRICS_FILE)
    rows = by_step(written)
    events = stitch(read_events(folder))
    dropped, trained = _fates(rows, events, run)
    return Report(
        folder=folder,
        name=str(config.get("name") or folder.resolve().name),
        state=str(run.get("state") or "unknown"),
        config=config,
        run=run,
        rows=rows,
        evaluation=by_step(read_jsonl(folder / "evaluation.jsonl")),
        events=events,
        verdict=find_bottleneck(events, config, dropped_share(dropped, trained), cores=run.get("cores")),
        dropped=dropped,
        trained=trained,
        elapsed_s=_elapsed_s(written, run, events),
        samples=_first_and_last_samples(folder / SAMPLES_FOLDER),
    )


# ------------------------------------------------------------------------------------------------------------ files


def _read_dict(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _read_dict(folder / "config.json")


def by_step(rows: Sequence[Any]) -> list[dict[str, float]]:
    """Rows with a step, in order of step; of a step written twice (a run that was resumed) the last row holds."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("step"), int | float):
            continue
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)}
        if "step" in numbers:
            found[int(row["step"])] = numbers
    return [found[step] for step in sorted(found)]


def _first_and_last_samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("step_*.jsonl")):
        digits = path.stem.removeprefix("step_")
        if digits.isdigit():
            files[int(digits)] = path
    chosen = [min(files), max(files)] if files else []
    read = {step: [row for row in read_jsonl(files[step]) if isinstance(row, dict)] for step in chosen}
    return {step: rows for step, rows in read.items() if rows}


def dropped_share(dropped: Mapping[str, int], trained: int) -> float:
    """Of the units that came to an end; what was only left over when the run ended is not counted."""
    lost = sum(count for reason, count in dropped.items() if reason not in ("end", "stopped"))
    return lost / (lost + trained) if lost else 0.0


def _elapsed_s(rows: Sequence[Any], run: Mapping[str, Any], events: Sequence[Event]) -> float | None:
    """Seconds of all parts of a run: the clock of each begins anew."""
    clocks = [row.get("time/elapsed_s") for row in rows if isinstance(row, dict)]
    clocks = [float(clock) for clock in clocks if isinstance(clock, int | float) and math.isfinite(clock)]
    before = sum(clock for clock, following in pairwise(clocks) if following < clock)
    last = clocks[-1:] + [float(known) for known in [run.get("elapsed_s")] if isinstance(known, int | float)]
    if last:
        return before + last[-1]
    return max((e.time_ns + e.duration_ns for e in events), default=0) / 1e9 or None


def _fates(
    rows: Sequence[Mapping[str, float]], events: Sequence[Event], run: Mapping[str, Any]
) -> tuple[dict[str, int], int]:
    """(drops by reason, trained units), from the last row of metrics or else from events."""
    dropped: Counter[str] = Counter()
    for name, value in (rows[-1] if rows else {}).items():
        if name.startswith("drops/") and name.count("/") == 1 and value > 0:
            dropped[name.removeprefix("drops/")] = int(value)
    if not dropped:
        dropped.update(e.subject_id.rpartition(":")[2] or "unnamed" for e in events if e.kind == "dropped")
    counts = run.get("counts")
    trained = counts.get("trained") if isinstance(counts, dict) else None
    if not isinstance(trained, int | float):
        trained = sum(event.kind == "trained" for event in events)
    return dict(dropped.most_common()), int(trained)


def step_times_from_events(events: Sequence[Event], steps: Sequence[int]) -> dict[str, list[float]]:
    """Event kind -> seconds within each step. A step ends when the last unit of its version is recorded as trained."""
    ends: dict[int, int] = {}
    for event in events:
        if event.kind == "trained" and event.version >= 0:
            ends[event.version] = max(ends.get(event.version, 0), event.time_ns)
    if not ends:
        return {}
    start = flow_window(events)[0]
    windows = {}
    for version in sorted(ends):
        windows[version] = (start, ends[version])
        start = ends[version]
    times = {}
    for kind, _ in STEP_PARTS.values():
        waiting = kind.startswith("wait")
        intervals = wait_intervals(events, kind) if waiting else busy_intervals(events, "trainer", (kind,))
        times[kind] = [total_ns(clip(intervals, windows[s])) / 1e9 if s in windows else math.nan for s in steps]
    return times


# --------------------------------------------------------------------------------------------------------- terminal


def _words(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{number(value)}{unit}"


def headline(report: Report) -> str:
    parts = [report.state, f"{int(report.steps()[-1]) if report.rows else 0} steps"]
    if report.elapsed_s:
        parts.append(clock(report.elapsed_s))
    return ", ".join(parts)


def _picture(report: Report, width: int) -> Group:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(report, max(10, width - 60)):
        table.add_row(name, Text(value))
    blocks: list[Any] = [Text(f"{report.name}: {headline(report)}", style="bold"), Text(""), table]
    lines = [report.verdict.sentence, *report.verdict.notes]
    blocks.append(Panel(Text("\n".join(lines)), title="bottleneck", title_align="left", border_style="yellow"))
    return Group(*blocks)


def facts(report: Report, width: int = 40) -> list[tuple[str, str]]:
    """Name and value of what the terminal shows, only what was recorded."""
    found: list[tuple[str, str]] = []
    rewards = [v for v in report.column("reward/mean") if math.isfinite(v)]
    if rewards:
        start, end = report.mean("reward/mean", first=3), report.mean("reward/mean", last=5)
        found.append(
            ("reward", f"{_words(start)} at first, {_words(end)} in the last five steps   {sparkline(rewards, width)}")
        )
    for key, name in (("greedy", "held-out, greedy"), ("sampled", "held-out, sampled")):
        scores = [(int(row["step"]), row[key]) for row in report.evaluation if key in row]
        if scores:
            found.append((name, " → ".join(f"{number(value)} (step {step})" for step, value in _ends(scores))))
    attempts, parts, _ = report.names
    speed = [(report.mean("rate/samples_per_s"), f" {attempts}/s"), (report.mean("rate/tokens_per_s"), f" {parts}/s")]
    found.append(("speed", ", ".join(_words(v, unit) for v, unit in speed if v is not None)))
    lag, lag_max = report.mean("lag/mean"), max((v for v in report.column("lag/max") if math.isfinite(v)), default=None)
    found.append(("lag", f"mean {_words(lag)}, max {_words(lag_max)}" if lag is not None else ""))
    length, steps = report.mean("episode/length", last=5), report.mean("lag/step/mean")
    found.append(("episode length", f"{_words(length)} steps in the last five batches" if length is not None else ""))
    peak = max((v for v in report.column("lag/step/max") if math.isfinite(v)), default=None)
    found.append(("lag of a step", f"mean {_words(steps)}, max {_words(peak)}" if steps is not None else ""))
    gap = report.mean("mismatch/logprob_diff_mean", last=5)
    peak = max((v for v in report.column("mismatch/logprob_diff_max")[-5:] if math.isfinite(v)), default=None)
    error = report.last("engine/weight_error")
    rounded = f"; the engines' weights are rounded by {_words(error)}" if error else ""
    found.append(
        (
            "log-prob difference",
            f"mean {_words(gap)}, max {_words(peak)} in the last five steps{rounded}" if gap is not None else "",
        )
    )
    weight, kept = report.mean("correction/weight_mean", last=5), report.mean("correction/weight_ess", last=5)
    out = report.mean("correction/masked_share", last=5)
    left = f", {100 * out:.2g}% of the tokens left out" if out else ""
    worth = f"mean weight {_words(weight)}, which count as {_words(kept)} of the tokens{left}"
    found.append(("correction", worth if weight is not None else ""))
    p50, p99 = report.last("length/p50"), report.last("length/p99")
    cut = report.last("length/truncated_share")
    truncated = f", {100 * cut:.0f}% truncated" if cut is not None else ""
    found.append(("lengths", f"p50 {_words(p50)}, p99 {_words(p99)} tokens{truncated}" if p50 is not None else ""))
    sync, still = report.mean("sync/seconds"), report.mean("sync/standstill_s")
    standstill = f", engines stood still {1000 * still:.1f} ms" if still is not None else ""
    found.append(("weight sync", f"{_words(sync)} s{standstill}" if sync is not None else ""))
    lost = ", ".join(f"{reason} {count}" for reason, count in report.dropped.items())
    found.append(("units", f"{report.trained} trained, dropped: {lost or 'none'}" if report.trained or lost else ""))
    idle = idle_shares(report.events, flow_window(report.events)) if report.events else {}
    found.append(("idle", ", ".join(f"{source} {100 * share:.0f}%" for source, share in idle.items())))
    return [(name, value) for name, value in found if value] or [("nothing", "no step was recorded")]


def _ends(scores: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return scores if len(scores) == 1 else [scores[0], scores[-1]]
