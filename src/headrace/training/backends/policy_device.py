"""What every trainer of a control policy does beside learning: publish, name, save, and say when it was busy."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import nn

from headrace.errors import ConfigError
from headrace.policies.config import PolicyConfig
from headrace.protocols import WeightChannel, WorkerContext
from headrace.training import checkpoint_folder
from headrace.training.config import AlgorithmConfig, TrainingConfig
from headrace.types import Event, WeightTicket

WEIGHTS = "policy.safetensors"


class PolicyDevice:
    """`_network` is what actors run: its state is published. A subclass fills a checkpoint's folder in `_fill`."""

    _network: nn.Module

    def __init__(
        self,
        context: WorkerContext,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        policy: PolicyConfig,
        channel: WeightChannel | None,
        seed: int,
    ) -> None:
        self._context, self._channel = context, channel
        self._training, self._algorithm, self._policy, self._seed = training, algorithm, policy, seed
        self._version = -1

    async def publish(self, version: int) -> WeightTicket:
        """Send weights and running figures through the channel as `version`."""
        if self._channel is None:
            raise ConfigError("weights.channel", "this trainer was built without a channel: it cannot publish")
        with self._event("publish", version):
            ticket = self._channel.publish(self._network.state_dict().items(), version)
        self._version = version
        return ticket

    async def republish(self) -> WeightTicket:
        """The last version again, whole: for a receiver that has no base for what changed."""
        return self._channel.whole()  # type: ignore[union-attr]

    async def fingerprint(self) -> str:
        """sha256 over all weights and running figures."""
        digest = hashlib.sha256()
        for tensor in self._network.state_dict().values():
            digest.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
        return digest.hexdigest()

    async def save(self, folder: str) -> None:
        """Write the folder whole or not at all: weights, optimiser, random state, manifest."""
        with self._event("save"):
            checkpoint_folder.write_folder(folder, self._fill)

    def _fill(self, folder: Path) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing is held outside this process."""

    @contextmanager
    def _event(self, kind: str, version: int | None = None) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            version = self._version if version is None else version
            ended = time.monotonic_ns()
            self._context.record(Event(start, self._context.name, kind, "", version, ended - start))
