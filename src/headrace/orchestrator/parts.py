"""What assembling a run hands around: what was asked for, what every run has, and what differs between kinds of work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.exchange.buffer import LeaseBuffer
from headrace.orchestrator.checkpoint import Restored
from headrace.orchestrator.dispatcher import Dispatcher
from headrace.orchestrator.evaluate import Evaluation
from headrace.orchestrator.learner import Learner
from headrace.protocols import Runtime, TaskSource
from headrace.types import Event


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A resolved config, the run's folder, and how it was started.

    only: "rollout" or "train", one plane alone; samples: the recorded groups that `only = "train"` trains on
    token: what clients of a served run must show; "" for one that is made up
    """

    config: RunConfig
    run_dir: Path
    only: str | None = None
    resume: bool = False
    samples: Path | None = None
    token: str = ""


@dataclass(slots=True)
class Flow:
    """What every run has, whatever its work: where parts are started, called, fed and watched.

    stack: closes what was opened, last first; restored: the checkpoint that the run goes on from
    """

    stack: AsyncExitStack
    runtime: Runtime
    source: TaskSource
    buffer: LeaseBuffer
    dispatcher: Dispatcher
    channel: Any
    record: Callable[[Event], None]
    restored: Restored | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What differs: who makes units, who trains on them, and how a unit is shown.

    spawn_engine: builds a replacement by its name; backend: the trainer's proxy
    describe: a unit in a line; decode: token ids to text, None for units without text
    names: of attempts, their parts and units, for people
    """

    rollout: Any
    learner: Learner
    spawn_engine: Callable[[str], Any]
    backend: Any
    describe: Callable[[Any], str]
    decode: Callable[[Any], str] | None = None
    names: tuple[str, str, str] = ("samples", "tokens", "groups")
    evaluator: Evaluation | None = None
    reward_metrics: Callable[[], dict[str, Any]] = dict
