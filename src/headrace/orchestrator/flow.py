"""What a flow is set to, and what it tells while it runs: the controller's numbers, its report of a step, its observer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.orchestrator.weight_sync import SyncTimes
from headrace.protocols import Lease
from headrace.types import Event, Metrics, Unit

if TYPE_CHECKING:
    from headrace.orchestrator.controller import Controller


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Numbers that the controller goes by; `batch` and `stream_groups` in units, `refill_limit` in batches."""

    batch: int
    steps: int
    every_steps: int = 1
    refill_limit: int = 4
    stream_groups: int = 0
    checkpoint_every: int = 0
    evaluate_every: int = 0
    stall_warning_s: float = 30.0
    stall_stop_s: float = 900.0
    max_dropped: int = 128
    restarts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One trained batch: `lags` by unit, seconds of the loop's phases."""

    step: int
    version: int
    units: list[Any]
    lags: list[int]
    metrics: Metrics
    wait_batch_s: float
    wait_sync_s: float
    train_s: float
    publish_s: float
    step_s: float
    sync: SyncTimes | None


class FlowObserver(Protocol):
    """Who watches a run: records events, shows steps, keeps checkpoints, evaluates. None of it changes what flows.

    Training stands while `checkpoint` and `evaluate` are awaited; rollouts go on.
    """

    def event(self, event: Event) -> None:
        """Something of the controller's, for the timeline; parts report their own."""
        ...

    def step(self, report: StepReport) -> None: ...

    def message(self, text: str) -> None:
        """One line for people."""
        ...

    def dropped(self, lease: Lease, reason: str, unit: Unit | None) -> None:
        """A lease ended untrained, recycled ones included; `unit` if it had come so far."""
        ...

    def version_written(self, version: int) -> None:
        """Make the number durable: called before any engine may see it."""
        ...

    async def checkpoint(self, controller: Controller) -> None:
        """A checkpoint that cannot be written is said, not raised."""
        ...

    async def evaluate(self, step: int) -> None: ...
