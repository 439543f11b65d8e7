"""A batch of scored groups, or of trajectories, into changed weights, by the calls of a training backend.

Order: group advantages over whole groups, micro-batches, annotation before the first update, then per minibatch the
sum of its micro-batches' gradients and one optimiser step. A trainer that streams sums up gradients as groups come.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.exchange.codec import GroupWriter
from headrace.training.advantages import group_advantages
from headrace.training.batching import (
    annotations_needed,
    denominator,
    filter_zero_variance,
    make_batches,
    rows_of_groups,
)
from headrace.training.config import TrainingConfig
from headrace.training.metrics import batch_metrics, sharing_metrics
from headrace.training.steps import episode_metrics, step_batch
from headrace.types import Group, Metrics, Stat, TokenBatch, Trajectory, WeightTicket, merge_metrics

KEEPER_FILE = "written.json"


class Learner(Protocol):
    """What the controller trains with. `updates_weights` False: there is never anything to publish after the start."""

    updates_weights: bool
    done: bool
    """Nothing is left to learn: the run ends after this step."""

    def unwanted(self, units: Sequence[Any]) -> list[bool]:
        """Which of the units are not worth training on."""
        ...

    async def begin(self, units: Sequence[Any]) -> None:
        """Start on a part of the next batch; `train` then gets all of it. Called only with `training.stream_groups`."""
        ...

    async def train(self, units: Sequence[Any]) -> Metrics: ...

    async def publish(self, version: int) -> WeightTicket: ...

    async def save(self, folder: Path) -> None: ...


class TokenLearner:
    """Trains a language policy on scored groups. lag: version -> trained batches since then."""

    updates_weights, done = True, False

    def __init__(
        self, backend: Any, config: TrainingConfig, *, max_length: int, lag: Callable[[int], int] = lambda version: 0
    ) -> None:
        self.backend, self.config, self.max_length, self.lag = backend, config, max_length, lag
        self.begun: list[Metrics] = []
        """Of the micro-batches of this batch whose gradient is there already."""

    def unwanted(self, units: Sequence[Group]) -> list[bool]:
        if not self.config.advantage.drop_zero_variance:
            return [False] * len(units)
        kept = {group.group_id for group in filter_zero_variance(units)[0]}
        return [group.group_id not in kept for group in units]

    async def begin(self, units: Sequence[Group]) -> None:
        advantages = group_advantages(units, self.config.advantage)
        for micros in await self._minibatches(units, advantages, partial=True):
            self.begun.extend([await self.backend.forward_backward(micro) for micro in micros])

    async def train(self, units: Sequence[Group]) -> Metrics:
        advantages = group_advantages(units, self.config.advantage)
        rows = rows_of_groups(units, advantages, self.config)
        metrics = batch_metrics(units, advantages, self.config, rows)
        if self.config.stream_groups:
            return merge_metrics([metrics, await self._finish(units, advantages)])
        minibatches = await self._minibatches(units, advantages, rows=rows)
        parts = [metrics, sharing_metrics(minibatches)]
        for _ in range(self.config.epochs):
            for micros in minibatches:
                parts.extend([await self.backend.forward_backward(micro) for micro in micros])
                parts.append(await self.backend.optimizer_step())
        return merge_metrics(parts)

    async def _finish(self, units: Sequence[Group], advantages: list[Any]) -> Metrics:
        """One step with the gradient that `begin` summed up, divided by the size that is known now."""
        parts, self.begun = self.begun, []
        if not parts:
            return {}
        scale = 1.0 / denominator(units, advantages, self.config)
        metrics = merge_metrics([*parts, await self.backend.optimizer_step(scale)])
        if "loss/total" in metrics:
            metrics["loss/total"] = Stat(metrics["loss/total"].total * scale)
        return metrics

    async def _minibatches(
        self, units: Sequence[Group], advantages: list[Any], *, partial: bool = False, rows: Any = None
    ) -> list[list[TokenBatch]]:
        """[minibatch][micro-batch], annotated."""
        config = self.config
        minibatches = make_batches(units, advantages, config, max_length=self.max_length, partial=partial, rows=rows)
        if config.loss.old_logprobs == "interpolated":
            minibatches = [[self._with_lags(micro) for micro in micros] for micros in minibatches]
        if needed := annotations_needed(config):
            minibatches = [[await self.backend.annotate(micro, needed) for micro in micros] for micros in minibatches]
        return minibatches

    def _with_lags(self, batch: TokenBatch) -> TokenBatch:
        versions, where = np.unique(batch.target_versions, return_inverse=True)
        return replace(batch, target_lags=np.array([self.lag(int(version)) for version in versions])[where])

    async def publish(self, version: int) -> WeightTicket:
        return await self.backend.publish(version)

    async def save(self, folder: Path) -> None:
        await self.backend.save(str(folder))


class ControlLearner:
    """Trains a control policy on trajectories, all in one call to its trainer.

    target: the mean return of the last `WINDOW` episodes at which nothing is left to learn; None: there is no such
    """

    WINDOW = 100
    updates_weights = True

    def __init__(self, backend: Any, gamma: float, target: float | None) -> None:
        self.backend, self.gamma, self.target = backend, gamma, target
        self.done = False
        self.returns: deque[float] = deque(maxlen=self.WINDOW)

    def unwanted(self, units: Sequence[Trajectory]) -> list[bool]:
        return [False] * len(units)

    async def begin(self, units: Sequence[Trajectory]) -> None:
        """Nothing: `training.stream_groups` is for language models."""

    async def train(self, units: Sequence[Trajectory]) -> Metrics:
        metrics = episode_metrics(units)
        for unit in units:
            self.returns.extend(unit.episode_returns.tolist()[-self.WINDOW :])
        if self.returns:
            metrics["reward/mean"] = Stat(float(np.mean(self.returns)))
        reached = self.target is not None and len(self.returns) == self.WINDOW
        self.done = reached and metrics["reward/mean"].mean >= self.target  # type: ignore[operator]
        return metrics | await self.learn(units)

    async def learn(self, units: Sequence[Trajectory]) -> Metrics:
        return await self.backend.update(step_batch(units, self.gamma))

    async def publish(self, version: int) -> WeightTicket:
        return await self.backend.publish(version)

    async def save(self, folder: Path) -> None:
        await self.backend.save(str(folder))


class TensorLearner(ControlLearner):
    """Hands trajectories of tensors to its trainer as they are."""

    async def learn(self, units: Sequence[Trajectory]) -> Metrics:
        return await self.backend.learn(units)


class GroupKeeper:
    """Writes groups to a file in place of training on them (`--only rollout`).

    checkpoint: the model folder of a checkpoint to go on from; what was written after it will be written again
    """

    updates_weights, done = False, False

    def __init__(self, publisher: Any, path: Path, checkpoint: Path | None = None) -> None:
        if checkpoint is not None:
            size = int(json.loads((checkpoint / KEEPER_FILE).read_bytes())["bytes"])
            with path.open("r+b") as file:
                file.truncate(size)
        self.publisher, self.path, self.writer = publisher, path, GroupWriter(path)

    def unwanted(self, units: Sequence[Group]) -> list[bool]:
        return [False] * len(units)

    async def begin(self, units: Sequence[Group]) -> None:
        """Nothing: what is written is written whole."""

    async def train(self, units: Sequence[Group]) -> Metrics:
        started = time.perf_counter()
        size = sum(self.writer.write(group) for group in units)
        written = {"written/bytes": Stat(float(size)), "written/seconds": Stat(time.perf_counter() - started)}
        return merge_metrics([batch_metrics(units), written])

    async def publish(self, version: int) -> WeightTicket:
        return await self.publisher.publish(version)

    async def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / KEEPER_FILE).write_text(json.dumps({"bytes": self.path.stat().st_size}), encoding="utf-8")
