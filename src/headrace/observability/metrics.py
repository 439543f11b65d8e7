"""Turns statistics, lags, drops and events into rows of named floats. What a batch is worth is measured in `training.metrics`."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from headrace.observability.activity import Interval, busy_kinds, merge, part_of, total_ns
from headrace.types import Event, Metrics, Stat, Trajectory, Unit

LAG_BUCKETS = 16
"""Lags from this on share one bucket of the histogram."""
STEP_KINDS = ("annotate", "forward_backward", "optimizer_step")
"""Kinds of the trainer's work within a step."""


def flatten(metrics: Metrics | Mapping[str, float | Stat]) -> dict[str, float]:
    """Statistics into floats: the largest value for a name that ends in "max", else the mean."""
    row = {}
    for name, value in metrics.items():
        if isinstance(value, Stat):
            takes_max = name.endswith("max") and value.maximum != float("-inf")
            row[name] = float(value.maximum if takes_max else value.mean)
        else:
            row[name] = float(value)
    return row


def mean(values: Iterable[float]) -> float:
    """0 for no values; values that are not finite are left out."""
    finite = [value for value in map(float, values) if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else 0.0


# ------------------------------------------------------------------------------------------------------------- lags


def lag_metrics(lags: Sequence[int]) -> dict[str, float]:
    """lag/mean, lag/max, and lag/hist/N: how many units had lag N ("16+" from 16 on)."""
    row = {"lag/mean": mean(lags), "lag/max": float(max(lags, default=0))}
    histogram = Counter(min(max(0, int(lag)), LAG_BUCKETS) for lag in lags)
    for lag, count in sorted(histogram.items()):
        row[f"lag/hist/{lag if lag < LAG_BUCKETS else f'{LAG_BUCKETS}+'}"] = float(count)
    return row


def lag_histogram(rows: Iterable[Mapping[str, float | None]]) -> dict[str, int]:
    """Lag -> units, summed over rows, in order of lag."""
    counts: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if name.startswith("lag/hist/") and value is not None:
                counts[name.removeprefix("lag/hist/")] += int(value)
    return dict(sorted(counts.items(), key=lambda item: int(item[0].rstrip("+"))))


# ------------------------------------------------------------------------------------------------------------ drops


def length_bucket(length: int) -> str:
    """The bucket of a completion length, bounds included: 0-15, 16-31, 32-63, 64-127, ... doubling."""
    if length < 16:
        return "0-15"
    low = 1 << (int(length).bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def bucket_order(bucket: str) -> int:
    return int(bucket.split("-")[0])


class DropTally:
    """What became of completions, by reason and by length, over a whole run.

    Dropping by age or time falls on long completions first and so biases training towards short ones; the rate by length
    shows it.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        """Reason -> dropped units."""
        self.seen: Counter[str] = Counter()
        """Length bucket -> completions that were trained or dropped."""
        self.lost: Counter[str] = Counter()
        """Length bucket -> completions that were dropped."""

    def trained(self, lengths: Iterable[int]) -> None:
        """A unit's completions, by their sampled tokens, were trained on."""
        self.seen.update(length_bucket(length) for length in lengths)

    def dropped(self, reason: str, lengths: Iterable[int] = ()) -> None:
        """A unit was dropped; `lengths` are the tokens sampled so far of its completions, as far as known."""
        self.reasons[reason] += 1
        for length in lengths:
            self.seen[length_bucket(length)] += 1
            self.lost[length_bucket(length)] += 1

    def row(self) -> dict[str, float]:
        """drops/REASON (units), drops/by_length/BUCKET (share dropped), drops/seen_by_length/BUCKET (completions)."""
        row = {f"drops/{reason}": float(count) for reason, count in sorted(self.reasons.items())}
        for bucket in sorted(self.seen, key=bucket_order):
            row[f"drops/by_length/{bucket}"] = self.lost[bucket] / self.seen[bucket]
            row[f"drops/seen_by_length/{bucket}"] = float(self.seen[bucket])
        return row

    def state(self) -> dict[str, dict[str, int]]:
        """JSON-able, for a checkpoint."""
        return {"reasons": dict(self.reasons), "seen": dict(self.seen), "lost": dict(self.lost)}

    def restore(self, state: Mapping[str, Mapping[str, int]]) -> None:
        self.reasons = Counter(state.get("reasons", {}))
        self.seen = Counter(state.get("seen", {}))
        self.lost = Counter(state.get("lost", {}))


def unit_lengths(unit: Unit) -> list[int]:
    """As `DropTally` wants them: sampled tokens of each episode of a group, valid steps of a trajectory."""
    if isinstance(unit, Trajectory):
        return [unit.size]
    return [episode.completion_length for episode in unit.episodes]


def unit_samples(unit: Unit) -> int:
    """Episodes of a group, or that ended in a trajectory."""
    return len(unit.episode_returns) if isinstance(unit, Trajectory) else len(unit.episodes)


def step_lags(trajectories: Sequence[Trajectory], lag: Callable[[int], int]) -> dict[str, float]:
    """lag/step/mean and max over all valid steps: the weights may change within a trajectory. lag: of a version."""
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        versions, times = np.unique(trajectory.policy_versions[trajectory.valid], return_counts=True)
        for version, count in zip(versions.tolist(), times.tolist(), strict=True):
            counts[lag(version)] += count
    total = sum(counts.values())
    if not total:
        return {}
    return {
        "lag/step/mean": sum(lag * count for lag, count in counts.items()) / total,
        "lag/step/max": float(max(counts)),
    }


# ------------------------------------------------------------------------------------------------------------- work


class WorkTally:
    """How busy each part was between one row and the next, by the events that came in meanwhile.

    An event is counted when it arrives, up to half a second after its end: shares are right over several steps, and off by
    so much in one. The first window opens with the first event. Any thread may report one.
    """

    def __init__(self) -> None:
        self._worked: dict[str, list[Interval]] = {}
        """Source -> when it worked, since the last row. A source that was seen once stays."""
        self._training_ns: Counter[str] = Counter()
        """Kind of the trainer's work -> time since the last row."""
        self._since_ns: int | None = None
        self._lock = threading.Lock()

    def event(self, event: Event) -> None:
        with self._lock:
            if self._since_ns is None:
                self._since_ns = event.time_ns
            if event.kind not in busy_kinds(event.source):
                return
            self._worked.setdefault(event.source, []).append((event.time_ns, event.time_ns + event.duration_ns))
            if part_of(event.source) == "trainer":
                self._training_ns[event.kind] += event.duration_ns

    def row(self, now_ns: int) -> dict[str, float]:
        """idle/SOURCE for every part seen so far, and time/KIND_s for the trainer's kinds of work; starts over."""
        with self._lock:
            worked, self._worked = self._worked, {source: [] for source in self._worked}
            training_ns, self._training_ns = self._training_ns, Counter()
            since_ns, self._since_ns = self._since_ns, now_ns
        window_ns = max(1, now_ns - since_ns) if since_ns is not None else 1
        row = {
            f"idle/{source}": max(0.0, 1.0 - total_ns(merge(at)) / window_ns) for source, at in sorted(worked.items())
        }
        for kind in STEP_KINDS:
            row[f"time/{kind}_s"] = training_ns[kind] / 1e9
        return row
