"""Turns fresh trajectories into updates from all that the replay holds: draws, trainer calls, new priorities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.exchange.config import ReplayConfig
from headrace.exchange.replay import ReplayBuffer
from headrace.orchestrator.learner import ControlLearner
from headrace.types import Metrics, Stat, Trajectory, merge_metrics


class ReplayLearner(ControlLearner):
    """Pays for each fresh step with `updates_per_step` updates, fractions carried over, once the replay holds enough.

    batches: of the whole run, over which the exponent of the importance weights rises to 1
    """

    def __init__(
        self, backend: Any, buffer: ReplayBuffer, config: ReplayConfig, target: float | None, batches: int
    ) -> None:
        super().__init__(backend, 0.0, target)
        self.buffer, self.config, self.batches = buffer, config, batches
        self.owed = 0.0

    async def learn(self, units: Sequence[Trajectory]) -> Metrics:
        config, buffer = self.config, self.buffer
        parts = []
        if buffer.store.drawable >= max(1, config.learning_starts):
            self.owed += config.updates_per_step * sum(unit.size for unit in units)
            importance = self._importance()
            while self.owed >= 1:
                self.owed -= 1
                drawn = buffer.draw(config.draw, config.n_steps, importance)
                metrics, errors = await self.backend.update(drawn)
                buffer.reprioritise(drawn.serials, errors)
                parts.append(metrics)
        return merge_metrics([*parts, {"replay/updates": Stat(float(len(parts)))}, buffer.metrics()])

    def _importance(self) -> float:
        if not self.config.priority:
            return 0.0
        progress = min(1.0, self.buffer.versions.version / self.batches)
        return self.config.importance + (1 - self.config.importance) * progress
