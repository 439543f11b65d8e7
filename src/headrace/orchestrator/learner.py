"""A batch of scored groups into changed weights, by the calls of a training backend.

Order: group advantages over whole groups, micro-batches, annotation before the first update, then per minibatch the
sum of its micro-batches' gradients and one optimiser step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.exchange.codec import GroupWriter
from headrace.training.advantages import group_advantages
from headrace.training.batching import annotations_needed, filter_zero_variance, make_batches
from headrace.training.config import TrainingConfig
from headrace.training.metrics import batch_metrics
from headrace.types import Group, Metrics, Stat, WeightTicket, merge_metrics

KEEPER_FILE = "written.json"


class Learner(Protocol):
    """What the controller trains with. `updates_weights` False: there is never anything to publish after the start."""

    updates_weights: bool

    def unwanted(self, units: Sequence[Any]) -> list[bool]:
        """Which of the units are not worth training on."""
        ...

    async def train(self, units: Sequence[Any]) -> Metrics: ...

    async def publish(self, version: int) -> WeightTicket: ...

    async def save(self, folder: Path) -> None: ...


class TokenLearner:
    """Trains a language policy on scored groups."""

    updates_weights = True

    def __init__(self, backend: Any, config: TrainingConfig, *, max_length: int) -> None:
        self.backend, self.config, self.max_length = backend, config, max_length

    def unwanted(self, units: Sequence[Group]) -> list[bool]:
        if not self.config.advantage.drop_zero_variance:
            return [False] * len(units)
        kept = {group.group_id for group in filter_zero_variance(units)[0]}
        return [group.group_id not in kept for group in units]

    async def train(self, units: Sequence[Group]) -> Metrics:
        config = self.config
        advantages = group_advantages(units, config.advantage)
        metrics = [batch_metrics(units, advantages, config)]
        minibatches = make_batches(units, advantages, config, max_length=self.max_length)
        needed = annotations_needed(config)
        if needed:
            minibatches = [[await self.backend.annotate(micro, needed) for micro in micros] for micros in minibatches]
        for _ in range(config.epochs):
            for micros in minibatches:
                metrics.extend([await self.backend.forward_backward(micro) for micro in micros])
                metrics.append(await self.backend.optimizer_step())
        return merge_metrics(metrics)

    async def publish(self, version: int) -> WeightTicket:
        return await self.backend.publish(version)

    async def save(self, folder: Path) -> None:
        await self.backend.save(str(folder))


class GroupKeeper:
    """Writes groups to a file in place of training on them (`--only rollout`).

    checkpoint: the model folder of a checkpoint to go on from; what was written after it will be written again
    """

    updates_weights = False

    def __init__(self, publisher: Any, path: Path, checkpoint: Path | None = None) -> None:
        if checkpoint is not None:
            size = int(json.loads((checkpoint / KEEPER_FILE).read_bytes())["bytes"])
            with path.open("r+b") as file:
                file.truncate(size)
        self.publisher, self.path, self.writer = publisher, path, GroupWriter(path)

    def unwanted(self, units: Sequence[Group]) -> list[bool]:
        return [False] * len(units)

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
