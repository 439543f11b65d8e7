"""Turns what the orchestrator reports (events, steps, samples) into the files of a run folder: the one object it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.observability.config import ObservabilityConfig
from headrace.observability.metrics import flatten
from headrace.observability.samples import Decode, write_samples
from headrace.observability.sinks import Sink, open_sinks
from headrace.observability.timeline import TRACE_FILE, Timeline, read_events, write_trace
from headrace.types import Event, Group, Metrics


class RunRecorder:
    """Records a run into `folder`; opening an existing folder appends to it (a resumed run).

    Recording never ends a run: a writer that fails (disk full, a tracker's network) is closed and left out from then on,
    with one line in `problems`. Only opening may raise, when the user can still mend it.
    """

    def __init__(self, folder: Path, config: ObservabilityConfig, run_config: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.problems: list[str] = []
        self._samples_every, self._samples_groups = config.samples_every, config.samples_groups
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = open_sinks(config, self.folder, run_config)
        self._timeline: Timeline | None = Timeline(self.folder)
        self._closed = False

    def event(self, event: Event) -> None:
        """Any thread may call it."""
        timeline = self._timeline
        if timeline is not None and not self._closed and not self._tried("events", lambda: timeline.record(event)):
            self._timeline = None

    def step(self, step: int, metrics: Metrics | Mapping[str, float]) -> None:
        """One row of metrics; what was recorded before is on disk when it returns."""
        row = flatten(metrics)
        self._sinks = [
            sink for sink in self._sinks if self._tried(type(sink).__name__, lambda sink=sink: sink.write(step, row))
        ]
        timeline = self._timeline
        if timeline is not None and not self._tried("events", timeline.flush):
            self._timeline = None

    def wants_samples(self, step: int) -> bool:
        """Every n-th step and the very first, to have something to compare with."""
        return self._samples_every > 0 and (step == 1 or step % self._samples_every == 0)

    def samples(
        self, step: int, groups: Sequence[Group], decode: Decode, advantages: Mapping[str, float] | None = None
    ) -> None:
        """Write the samples if it is their turn; call it at every step."""
        if self.wants_samples(step):
            shown = groups[: self._samples_groups or None]
            self._tried("samples", lambda: write_samples(self.folder, step, shown, decode, advantages, of=len(groups)))

    def close(self) -> None:
        """Flush everything and write the Perfetto trace. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for sink in self._sinks:
            self._tried(type(sink).__name__, sink.close)
        if self._timeline is not None:
            self._tried("events", self._timeline.close)
        self._tried(TRACE_FILE, lambda: write_trace(read_events(self.folder), self.folder / TRACE_FILE))

    def _tried(self, what: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:
            line = f"{what} is not recorded any more: {type(error).__name__}: {error}"
            if line not in self.problems:
                self.problems.append(line)
            return False
        return True
