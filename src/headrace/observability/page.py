"""Turns a report into one self-contained HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from headrace.observability.activity import busy_intervals, clip, flow_window, total_ns, working_sources
from headrace.observability.activity import busy_kinds as kinds_of
from headrace.observability.charts import (
    Series,
    bar_chart,
    line_chart,
    nothing,
    number,
    share_bars,
    stack_chart,
)
from headrace.observability.display import clock
from headrace.observability.metrics import bucket_order, lag_histogram
from headrace.observability.report import Report
from headrace.observability.strip import KIND_COLOURS, KIND_NAMES, strip

STEP_COLOURS = {
    "waiting for a batch": "var(--wait1)",
    "annotate": "var(--yellow)",
    "forward + backward": "var(--orange)",
    "optimizer": "var(--brown)",
    "publish": "var(--green)",
    "waiting for the last sync": "var(--wait3)",
    "save": "var(--grey)",
    "other": "var(--faint)",
}

SHOWN_SAMPLES = 4
SHOWN_CHARACTERS = 600


def render_page(report: Report) -> str:
    """The whole page as text."""
    assets = files("headrace.observability")
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = (assets / "page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.name)}: headrace report</title><style>{style}</style></head><body>"
        f"{_header(report)}<main>{_verdict(report)}{_tiles(report)}{_learning(report)}{_freshness(report)}"
        f"{_speed(report)}{_episodes(report) if report.control else _completions(report)}{_drops(report)}{_samples(report)}{_details(report)}</main>"
        f'<div id="tip"></div><script>{script}</script></body></html>'
    )


# ----------------------------------------------------------------------------------------------------------- blocks


def card(title: str, says: str, body: str, wide: bool = False) -> str:
    return (
        f'<section class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3><p>{escape(says)}</p>{body}</section>'
    )


def chapter(title: str, *cards: str) -> str:
    return f'<h2>{escape(title)}</h2><div class="cards">{"".join(cards)}</div>'


def _header(report: Report) -> str:
    steps = int(report.steps()[-1]) if report.rows else 0
    model = report.config.get("model", {})
    facts = [f"{steps} steps"]
    if report.elapsed_s:
        facts.append(clock(report.elapsed_s))
    if isinstance(model, dict) and model.get("path"):
        facts.append(str(model["path"]).rstrip("/").split("/")[-1])
    if report.config.get("placement"):
        facts.append(f"placement {report.config['placement']}")
    if report.config.get("seed") is not None:
        facts.append(f"seed {report.config['seed']}")
    badge = f'<span class="badge {escape(report.state)}">{escape(report.state)}</span>'
    words = " · ".join(escape(fact) for fact in facts)
    return f"<header><h1>{escape(report.name)} {badge}</h1><div>{words}</div></header>"


def _verdict(report: Report) -> str:
    notes = "".join(f"<p class='note'>{_keys(note)}</p>" for note in report.verdict.notes)
    return f'<div class="verdict"><b>Bottleneck: {report.verdict.part}</b><p>{_keys(report.verdict.sentence)}</p>{notes}</div>'


def _keys(text: str) -> str:
    """Escaped text in which config keys (words with a dot inside) stand out."""
    words = []
    for word in text.split(" "):
        bare = word.strip('.,;:()"')
        is_key = "." in bare and bare.replace(".", "").replace("_", "").isalpha()
        words.append(escape(word).replace(escape(bare), f"<code>{escape(bare)}</code>", 1) if is_key else escape(word))
    return " ".join(words)


def _tile(name: str, value: str, small: str = "") -> str:
    return f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(small)}</small></div>'


def _tiles(report: Report) -> str:
    tiles = []

    def add(name: str, value: float | None, unit: str = "", small: str = "") -> None:
        if value is not None:
            tiles.append(_tile(name, f"{number(round(value, 3) if abs(value) >= 0.01 else value)}{unit}", small))

    start = report.mean("reward/mean", first=3)
    add(
        "reward, last 5 steps",
        report.mean("reward/mean", last=5),
        "",
        f"from {number(start)}" if start is not None else "",
    )
    greedy = [row["greedy"] for row in report.evaluation if "greedy" in row]
    if greedy:
        add("held-out, greedy", greedy[-1], "", f"from {number(greedy[0])}" if len(greedy) > 1 else "")
    per_s = report.mean("rate/samples_per_s")
    tokens = report.mean("rate/tokens_per_s")
    attempts, parts, _ = report.names
    add(f"{attempts} a second", per_s, "", f"{number(round(tokens))} {parts} a second" if tokens is not None else "")
    add("seconds a step", report.mean("time/step_s"), " s")
    lag_max = max((v for v in report.column("lag/max") if math.isfinite(v)), default=None)
    add("lag, mean", report.mean("lag/mean"), "", f"max {number(lag_max)}" if lag_max is not None else "")
    still = report.mean("sync/standstill_s")
    add(
        "weight sync",
        report.mean("sync/seconds"),
        " s",
        f"stand-still {1000 * still:.1f} ms" if still is not None else "",
    )
    if report.trained or report.dropped:
        tiles.append(_tile("units dropped", f"{100 * report.dropped_share:.1f}%", f"{report.trained} trained"))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


# --------------------------------------------------------------------------------------------------------- chapters


def smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential mean that starts unbiased and passes over NaN."""
    out, total, mass = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        out.append(total / mass if mass else math.nan)
    return out


def _learning(report: Report) -> str:
    steps, reward = report.steps(), report.column("reward/mean")
    lines = [
        Series(name="reward, each step", xs=steps, ys=reward, colour="var(--blue)", style="faint"),
        Series(name="reward, smoothed", xs=steps, ys=smooth(reward), colour="var(--blue)"),
    ]
    for key, name, colour in (
        ("greedy", "held-out, greedy", "var(--orange)"),
        ("sampled", "held-out, sampled", "var(--green)"),
    ):
        at = [row["step"] for row in report.evaluation if key in row]
        ys = [row[key] for row in report.evaluation if key in row]
        lines.append(Series(name=name, xs=at, ys=ys, colour=colour, style="dots"))
    zero = report.column("group/zero_variance_share")
    cards = [
        card("Reward", "Mean score of each batch, and of held-out tasks where they were evaluated.",
             line_chart(lines, "mean reward", y_range=(0, None))),
        card("What there is to learn", "Spread of the rewards, and groups in which all are equal: those teach nothing.",
             line_chart([
                 Series(name="groups without variance (share)", xs=steps, ys=zero, colour="var(--red)"),
                 Series(name="reward standard deviation", xs=steps, ys=report.column("reward/std"), colour="var(--blue)"),
             ], "share · std", y_range=(0, None))),
        card("Entropy", "Of the policy, a token. Falling to zero early means that it stopped exploring.",
             _lines(report, "nats", ("entropy", "loss/entropy", "var(--teal)"))),
        card("Size of the updates", "Gradient norm before clipping. A spike that does not come back is an unstable run.",
             _lines(report, "gradient norm", ("gradient norm", "optimizer/grad_norm", "var(--orange)"))),
        card("Clipping", "Tokens whose probability moved beyond the clip range. Much of it: steps are too large.",
             _lines(report, "share of tokens", ("clipped tokens", "loss/clip_share", "var(--red)"))),
    ]  # fmt: skip
    if report.last("loss/kl") is not None:
        cards.append(
            card(
                "Distance to the reference",
                "KL divergence a token to the model at the start, which the loss holds down.",
                _lines(report, "nats", ("KL", "loss/kl", "var(--violet)")),
            )
        )
    return chapter("Does it learn?", *cards)


def _lines(report: Report, y_label: str, *lines: tuple[str, str, str], log: bool = False) -> str:
    steps = report.steps()
    series = [Series(name=name, xs=steps, ys=report.column(metric), colour=colour) for name, metric, colour in lines]
    return line_chart(series, y_label, y_range=(0, None), log=log)


def _freshness(report: Report) -> str:
    histogram = lag_histogram(report.rows)
    units = sum(histogram.values())
    bars = [(lag, float(count), f"{100 * count / units:.0f}%") for lag, count in histogram.items()] if units else []
    cards = [
        card("Rollout against trainer", "Difference of the two log-probabilities of a sampled token. Large: two policies.",
             _lines(report, "|Δ log-prob|, nats", ("mean", "mismatch/logprob_diff_mean", "var(--blue)"),
                    ("mean, mixed versions", "mismatch/mixed/logprob_diff_mean", "var(--orange)"),
                    ("max", "mismatch/logprob_diff_max", "var(--soft)"), log=True)),
        card("Lag of what was trained on", "Trained batches between sampling a unit's oldest token and its use.",
             bar_chart(bars, "lag, in versions", "units", "var(--violet)")),
        card("Effective sample size", "Share of the batch that importance weights leave. Near 0: few tokens decide.",
             line_chart([Series(name="effective share", xs=report.steps(), ys=report.column("correction/ess"),
                                colour="var(--green)")], "share", y_range=(0, 1))),
        card("Lag over the run", "Growing lag means that rollout runs away from training.",
             _lines(report, "versions", ("mean", "lag/mean", "var(--violet)"), ("max", "lag/max", "var(--soft)"))),
    ]  # fmt: skip
    return chapter("Are the samples fresh?", *cards)


def _speed(report: Report) -> str:
    layers = {name: (STEP_COLOURS[name], values) for name, values in report.step_times().items()}
    steps = report.steps()
    per_s, tokens = report.column("rate/samples_per_s"), report.column("rate/tokens_per_s")
    attempts, parts, units = report.names
    cards = [
        card("Where each step's seconds go", "The trainer's time from one batch to the next.",
             stack_chart(steps, layers, "seconds")),
        card("Where each part's time went", "Share of the flow's time in which a part worked; the empty rest it was idle.",
             share_bars(_share_rows(report))),
        card(f"{attempts.capitalize()} a second", "That reached training.",
             line_chart([Series(name="each step", xs=steps, ys=per_s, colour="var(--blue)", style="faint"),
                         Series(name="smoothed", xs=steps, ys=smooth(per_s), colour="var(--blue)")],
                        f"{attempts}/s", y_range=(0, None))),
        card(f"{parts.capitalize()} a second", "By all engines together.",
             line_chart([Series(name="each step", xs=steps, ys=tokens, colour="var(--teal)", style="faint"),
                         Series(name="smoothed", xs=steps, ys=smooth(tokens), colour="var(--teal)")],
                        f"{parts}/s", y_range=(0, None))),
        card("Weight sync", "Seconds from publish to live, and the longest stand-still of an engine.",
             _lines(report, "seconds", ("whole sync", "sync/seconds", "var(--green)"),
                    ("stand-still", "sync/standstill_s", "var(--red)"),
                    ("to the first token of the new version", "sync/to_first_token_s", "var(--violet)"), log=True)),
        card("Queue", f"{units.capitalize()} being made, ready for the trainer, and held altogether.",
             _lines(report, units, ("running", "queue/running", "var(--blue)"), ("ready", "queue/ready", "var(--green)"),
                    ("held", "queue/held", "var(--soft)"))),
        card("Who worked when", "Each part's work and waits; a vertical line marks new weights going live.",
             strip(report.events), wide=True),
    ]  # fmt: skip
    return chapter("Where does the time go?", *cards)


def _share_rows(report: Report) -> dict[str, list[tuple[str, str, float]]]:
    window = flow_window(report.events)
    length = max(1, window[1] - window[0])
    rows = {}
    for source in sorted(working_sources(report.events)):
        rows[source] = [
            (KIND_NAMES.get(kind, kind), KIND_COLOURS[kind],
             total_ns(clip(busy_intervals(report.events, source, (kind,)), window)) / length)
            for kind in kinds_of(source)
        ]  # fmt: skip
    return rows


def _completions(report: Report) -> str:
    steps = report.steps()
    finish = {
        "stop": ("var(--green)", report.column("finish/stop")),
        "length (truncated)": ("var(--red)", report.column("finish/length")),
        "abort": ("var(--grey)", report.column("finish/abort")),
    }
    cards = [
        card("Completion length", "Sampled tokens of a completion. A p99 at the limit means truncation.",
             _lines(report, "tokens", ("p50", "length/p50", "var(--blue)"), ("p99", "length/p99", "var(--orange)"),
                    ("mean", "length/mean", "var(--soft)"))),
        card("How completions ended", "Truncated ones rarely earn a reward and bias training towards short answers.",
             stack_chart(steps, finish, "share")),
    ]  # fmt: skip
    return chapter("What does it write?", *cards)


def _episodes(report: Report) -> str:
    cards = [
        card("Episode length", "Steps of the episodes that ended in each batch.",
             _lines(report, "steps", ("mean", "episode/length", "var(--blue)"))),
        card("Value function", "How much of the targets' variance it explains; 1 is all, below 0 it misleads.",
             line_chart([Series(name="explained variance", xs=report.steps(),
                                ys=report.column("value/explained_variance"), colour="var(--green)")],
                        "share", y_range=(None, 1))),
    ]  # fmt: skip
    return chapter("How do the episodes go?", *cards)


def _drops(report: Report) -> str:
    total = report.trained + sum(report.dropped.values())
    rows = [("trained", report.trained), *report.dropped.items()]
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{count}</td><td>{100 * count / total:.1f}%</td></tr>" for name, count in rows
    ) if total else ""  # fmt: skip
    table = f"<table><tr><th>became</th><th>units</th><th>share</th></tr>{body}</table>" if body else ""
    last = report.rows[-1] if report.rows else {}
    prefix = "drops/by_length/"
    buckets = sorted((n.removeprefix(prefix) for n in last if n.startswith(prefix)), key=bucket_order)
    bars = []
    for bucket in buckets:
        seen = last.get(f"drops/seen_by_length/{bucket}")
        share = 100 * last[prefix + bucket]
        bars.append((bucket, share, f"{share:.0f}%" + (f" of {number(seen)}" if seen is not None else "")))
    by_length = "Dropping by age falls on long completions first; a rising staircase is a bias towards short answers."
    return chapter(
        "What was lost?",
        card(
            "What became of the units",
            "Every unit that ended, by reason.",
            table or nothing("no unit ended in this run"),
        ),
        card("Drop rate by length", by_length, bar_chart(bars, "sampled tokens", "dropped, %", "var(--red)", y_max=10)),
    )


def _samples(report: Report) -> str:
    cards = []
    for step, rows in report.samples.items():
        shown = rows[:SHOWN_SAMPLES] if len(rows) <= SHOWN_SAMPLES else _spread(rows)
        body = "".join(_one_sample(row) for row in shown)
        cards.append(card(f"Step {step}", f"{len(shown)} of {len(rows)} recorded samples.", body))
    return chapter("Samples", *cards) if cards else ""


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evenly spaced rows, so that more than one group is seen."""
    return [rows[i * (len(rows) - 1) // (SHOWN_SAMPLES - 1)] for i in range(SHOWN_SAMPLES)]


def _one_sample(row: dict[str, Any]) -> str:
    def short(text: Any) -> str:
        text = str(text)
        return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"

    reward = row.get("reward")
    facts = ["no reward" if reward is None else f"reward {number(float(reward))}", str(row.get("finish_reason", ""))]
    versions = ", ".join(f"v{v} × {n}" for v, n in row.get("versions", []))
    facts.append(f"{row.get('tokens', '?')} tokens ({versions})")
    good = "good" if isinstance(reward, int | float) and reward > 0 else "bad"
    return (
        f'<div class="sample"><pre>{escape(short(row.get("prompt", "")))}</pre>'
        f'<pre class="{good}">{escape(short(row.get("completion", ""))) or "(empty)"}</pre>'
        f"<small>{escape(' · '.join(facts))}</small></div>"
    )


def _details(report: Report) -> str:
    last = report.rows[-1] if report.rows else {}
    rows = "".join(f"<tr><td>{escape(n)}</td><td>{number(v)}</td></tr>" for n, v in sorted(last.items()) if n != "step")
    metrics = f"<details><summary>All metrics of the last step</summary><table>{rows}</table></details>" if rows else ""
    config = json.dumps(report.config, indent=2, ensure_ascii=False, default=str)
    shown = f"<details><summary>Resolved config</summary><pre>{escape(config)}</pre></details>" if report.config else ""
    return f'<div class="details">{metrics}{shown}</div>'
