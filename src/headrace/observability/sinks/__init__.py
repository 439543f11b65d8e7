"""Turns the names in `observability.sinks` into open sinks, each in its own file behind one tiny interface."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.observability.config import ObservabilityConfig


class Sink(Protocol):
    """Takes one row of floats per step."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Idempotent."""
        ...


def tracker_id(folder: Path) -> str:
    """A run's name in a tracker: the folder's name and a random tail, kept in the folder.

    A resumed run finds the same one; another run whose folder has the same name does not write into it.
    """
    path = folder / "tracker_id"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{folder.name}-{uuid.uuid4().hex[:8]}", encoding="utf-8")
    return path.read_text(encoding="utf-8")


def open_sink(name: str, folder: Path, run_config: Mapping[str, Any] | None = None) -> Sink:
    """One sink. Its package is imported here, when it was chosen; `MissingExtra` says what to install."""
    match name:
        case "jsonl":
            from headrace.observability.sinks.jsonl import JsonlSink

            return JsonlSink(folder)
        case "tensorboard":
            from headrace.observability.sinks.tensorboard import TensorBoardSink

            return TensorBoardSink(folder)
        case "wandb":
            from headrace.observability.sinks.wandb import WandbSink

            return WandbSink(folder, run_config)
        case "trackio":
            from headrace.observability.sinks.trackio import TrackioSink

            return TrackioSink(folder, run_config)
    raise ValueError(f"no sink is called {name!r}")


def open_sinks(config: ObservabilityConfig, folder: Path, run_config: Mapping[str, Any] | None = None) -> list[Sink]:
    """Every sink that the config names, in its order; when one fails to open, those before it are closed."""
    sinks: list[Sink] = []
    try:
        for name in config.sinks:
            sinks.append(open_sink(name, folder, run_config))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks
