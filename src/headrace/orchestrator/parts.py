"""What differs between kinds of work, as one record: who makes units, who trains on them, and how a unit is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.orchestrator.evaluate import Evaluator
from headrace.orchestrator.learner import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """spawn_engine: builds a replacement by its name; backend: the trainer's proxy, for its fingerprint
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
    evaluator: Evaluator | None = None
    reward_metrics: Callable[[], dict[str, Any]] = dict
