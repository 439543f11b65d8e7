"""A run's metric rows into the dozen figures that presets are compared by. Rows of real and of simulated runs are alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.observability.metrics import lag_histogram

Row = Mapping[str, float | None]

NOT_LOST = ("end", "stopped")
"""Drop reasons that only say that the run was over."""
REWARD_WINDOW = 5
"""Steps over which a reward is averaged: one batch's is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One preset's run. Rates a second; shares of 1; NaN for what the run does not know.

    trainer_idle: share of the time in which the trainer had no batch, or waited for the sync before
    engine_idle: mean over the engines of the share in which they made no token
    wait_p99_s: the trainer's wait for a batch, its 99th percentile over steps
    sync_s: mean seconds from published to live; standstill_s: mean seconds that generation stood for a sync
    length_bias: mean length of what was trained / of what was sampled, - 1
    ess: effective share of the targets under the loss's weights
    curves: of each repetition, (seconds, samples, reward) after each step
    between: lowest and highest samples/s of the repetitions
    """

    name: str
    steps: int
    seconds: float
    samples_per_s: float
    tokens_per_s: float
    trainer_idle: float
    engine_idle: float
    wait_p99_s: float
    lag_mean: float
    lag_p99: float
    lag_max: float
    drops: dict[str, int]
    sync_s: float
    standstill_s: float
    length_bias: float
    ess: float
    curves: list[list[tuple[float, float, float]]] = field(default_factory=list)
    between: tuple[float, float] | None = None
    note: str = ""

    @property
    def dropped(self) -> int:
        return sum(self.drops.values())


def figures_of(name: str, rows: Sequence[Row], note: str = "") -> Figures:
    """Figures from the rows of a run's steps; rates leave out the time before the first step, which is start-up."""
    if not rows:
        nan = math.nan
        return Figures(
            name=name, steps=0, seconds=0.0, samples_per_s=nan, tokens_per_s=nan, trainer_idle=nan, engine_idle=nan,
            wait_p99_s=nan, lag_mean=nan, lag_p99=nan, lag_max=nan, drops={}, sync_s=nan, standstill_s=nan,
            length_bias=nan, ess=nan, note=note or "no step was trained",
        )  # fmt: skip
    samples = np.array([_samples(row) for row in rows])
    elapsed = _column(rows, "time/elapsed_s")
    lengths = _column(rows, "length/mean")
    # The first step holds the start-up: rates count from its end, unless it is the only one.
    since = elapsed[0] if len(rows) > 1 else 0.0
    counted = slice(1, None) if len(rows) > 1 else slice(None)
    seconds = max(float(elapsed[-1] - since), 1e-9)
    waiting = _column(rows, "time/wait_batch_s")[counted] + _column(rows, "time/wait_sync_s")[counted]
    lags = _lags(rows)
    last = rows[-1]
    return Figures(
        name=name,
        steps=len(rows),
        seconds=float(elapsed[-1]),
        samples_per_s=float(samples[counted].sum()) / seconds,
        tokens_per_s=float((samples * lengths)[counted].sum()) / seconds,
        trainer_idle=min(1.0, float(waiting.sum()) / seconds),
        engine_idle=_engine_idle(rows[counted]),
        wait_p99_s=float(np.percentile(_column(rows, "time/wait_batch_s")[counted], 99)),
        lag_mean=float(lags.mean()) if lags.size else 0.0,
        lag_p99=float(np.percentile(lags, 99)) if lags.size else 0.0,
        lag_max=max((row.get("lag/max") or 0.0) for row in rows),
        drops=_drops(last),
        sync_s=_mean(rows, "sync/seconds"),
        standstill_s=_mean(rows, "sync/standstill_s"),
        length_bias=_length_bias(last, float((samples * lengths).sum() / max(samples.sum(), 1.0))),
        ess=_mean(rows, "correction/ess"),
        curves=[curve] if (curve := _curve(rows, elapsed, samples)) else [],
        note=note,
    )


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.array([float(row.get(name) or 0.0) for row in rows])


def _mean(rows: Sequence[Row], name: str) -> float:
    found = [float(value) for row in rows if (value := row.get(name)) is not None]
    return sum(found) / len(found) if found else math.nan


def _samples(row: Row) -> float:
    units = sum(int(value or 0) for name, value in row.items() if name.startswith("lag/hist/"))
    return units * float(row.get("group/size_mean") or 1.0)


def _lags(rows: Sequence[Row]) -> np.ndarray:
    histogram = lag_histogram(rows)
    values = [int(lag.rstrip("+")) for lag in histogram]
    return np.repeat(np.array(values, dtype=float), list(histogram.values()))


def _engine_idle(rows: Sequence[Row]) -> float:
    shares = [float(v) for row in rows for name, v in row.items() if name.startswith("idle/engine") and v is not None]
    return sum(shares) / len(shares) if shares else math.nan


def _drops(row: Row) -> dict[str, int]:
    found = {name.removeprefix("drops/"): value for name, value in row.items() if name.count("/") == 1}
    return {
        reason: int(value)
        for reason, value in found.items()
        if f"drops/{reason}" in row and reason not in NOT_LOST and value
    }


def _length_bias(row: Row, trained_mean: float) -> float:
    """Relative change of the mean length by what was lost.

    A simulator knows how long every answer would have been. Of a real run, from the buckets of completions that were
    trained or dropped whole: what was cut off before its end is not seen there.
    """
    if drawn := row.get("length/drawn_mean"):
        return trained_mean / drawn - 1
    seen, kept, seen_tokens, kept_tokens = 0.0, 0.0, 0.0, 0.0
    for name, value in row.items():
        if not name.startswith("drops/seen_by_length/") or not value:
            continue
        bucket = name.removeprefix("drops/seen_by_length/")
        low, high = (int(bound) for bound in bucket.split("-"))
        middle, lost = (low + high) / 2, float(row.get(f"drops/by_length/{bucket}") or 0.0)
        seen, kept = seen + value, kept + value * (1 - lost)
        seen_tokens, kept_tokens = seen_tokens + value * middle, kept_tokens + value * (1 - lost) * middle
    return (kept_tokens / kept) / (seen_tokens / seen) - 1 if kept and seen_tokens else math.nan


def _curve(rows: Sequence[Row], elapsed: np.ndarray, samples: np.ndarray) -> list[tuple[float, float, float]]:
    if "reward/mean" not in rows[0]:
        return []
    return [
        (float(at), float(total), reward)
        for at, total, reward in zip(elapsed, samples.cumsum(), _column(rows, "reward/mean"), strict=True)
    ]


def reward_at(figures: Figures, limit: float, column: int) -> float:
    """Mean reward of the last steps before a time (column 0) or a number of samples (column 1), and over repetitions; NaN
    without any."""
    found = []
    for curve in figures.curves:
        if reached := [point[2] for point in curve if point[column] <= limit + 1e-9][-REWARD_WINDOW:]:
            found.append(sum(reached) / len(reached))
    return sum(found) / len(found) if found else math.nan


def common_limits(runs: Sequence[Figures]) -> tuple[float, float]:
    """(seconds, samples) that every run with rewards reached."""
    ends = [curve[-1] for figures in runs for curve in figures.curves]
    return min((end[0] for end in ends), default=math.nan), min((end[1] for end in ends), default=math.nan)


def merge(runs: Sequence[Figures]) -> Figures:
    """The median over a preset's repetitions, figure by figure; drops are summed."""
    first = runs[0]
    numbers = {
        name: float(np.nanmedian([getattr(run, name) for run in runs]))
        for name in Figures.__slots__
        if isinstance(getattr(first, name), float) and not all(math.isnan(getattr(run, name)) for run in runs)
    }
    drops: dict[str, int] = {}
    for run in runs:
        for reason, count in run.drops.items():
            drops[reason] = drops.get(reason, 0) + count
    rates = [run.samples_per_s for run in runs if not math.isnan(run.samples_per_s)]
    return replace(
        first,
        **numbers,
        drops=drops,
        curves=[curve for run in runs for curve in run.curves],
        between=(min(rates), max(rates)) if len(rates) > 1 else None,
        note="; ".join(dict.fromkeys(run.note for run in runs if run.note)),
    )
