"""Turns rows of metrics into a Weights & Biases run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import MissingExtra
from headrace.observability.sinks import tracker_id


class WandbSink:
    """A resumed run goes on in the same place."""

    def __init__(self, folder: Path, run_config: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "wandb", "the sink 'wandb'") from error
        self._run: Any = wandb.init(
            project="headrace",
            name=folder.name,
            id=tracker_id(folder),
            resume="allow",
            dir=str(folder),
            config=dict(run_config or {}),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
