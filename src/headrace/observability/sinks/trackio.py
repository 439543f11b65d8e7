"""Turns rows of metrics into a trackio run, which stays on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import MissingExtra
from headrace.observability.sinks import tracker_id


class TrackioSink:
    def __init__(self, folder: Path, run_config: Mapping[str, Any] | None = None) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingExtra("trackio", "trackio", "the sink 'trackio'") from error
        self._run: Any = trackio.init(
            project="headrace", name=tracker_id(folder), resume="allow", config=dict(run_config or {})
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
