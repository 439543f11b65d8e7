"""Turns finished, failed and waiting score calls into the reward plane's metrics."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.types import Metrics, Score, Stat


class RewardMeter:
    """Counts since the last `window`. Seconds are those of the loop's clock.

    `totals` counts over the whole life: scores, errors, timeouts, deaths (workers that died unasked), replacements.
    """

    def __init__(self) -> None:
        self.totals = {"scores": 0, "errors": 0, "none": 0, "timeouts": 0, "deaths": 0, "replacements": 0}
        self._before = dict(self.totals)
        self._seconds = Stat(0.0, 0.0)
        self._busy_s = 0.0
        self._carried_s = 0.0
        """Busy time of calls in progress that earlier windows have counted already."""
        self._since_s: float | None = None

    def count(self, name: str, amount: int = 1) -> None:
        self.totals[name] += amount

    def finished(self, scores: Sequence[Score]) -> None:
        """These scores were handed out."""
        self.count("scores", len(scores))
        self.count("errors", sum(score.error is not None for score in scores))
        self.count("none", sum(score.reward is None and score.error is None for score in scores))

    def called(self, seconds: float, requests: int) -> None:
        """One call of so many requests took a worker so long, whatever came of it."""
        self._busy_s += seconds
        each_s = seconds / max(1, requests)
        self._seconds += Stat(seconds, requests, each_s)

    def window(self, now_s: float, queued: int, workers: int, running_s: Sequence[float]) -> Metrics:
        """Metrics since the last window. `running_s` holds for how long each call in progress has been running."""
        since_s = now_s if self._since_s is None else self._since_s
        elapsed_s = now_s - since_s
        running = sum(running_s)
        delta = {name: self.totals[name] - self._before[name] for name in self.totals}
        capacity_s = elapsed_s * workers
        idle = 1.0 - min(1.0, (self._busy_s + running - self._carried_s) / capacity_s) if capacity_s > 0 else 0.0
        metrics = {
            "reward/scores_per_s": Stat(delta["scores"], elapsed_s) if elapsed_s > 0 else Stat(0.0),
            "reward/queue_depth": Stat(float(queued), 1.0, float(queued)),
            "reward/idle_share": Stat(idle, 1.0, idle),
            "reward/score_s": self._seconds,
        } | {f"reward/{name}": Stat(float(delta[name])) for name in self.totals if name != "scores"}
        self._before = dict(self.totals)
        self._seconds = Stat(0.0, 0.0)
        self._busy_s = 0.0
        self._carried_s = running
        self._since_s = now_s
        return metrics

    def start(self, now_s: float) -> None:
        """The first window opens now."""
        if self._since_s is None:
            self._since_s = now_s
