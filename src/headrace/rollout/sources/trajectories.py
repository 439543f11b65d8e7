"""Turns nothing into tasks for ever: an actor is to go on stepping, a client knows what to do; no task differs from another."""

from __future__ import annotations

from typing import Any

from headrace.types import Task


class TrajectorySource:
    """One task a trajectory, or whatever `kind` says; `source` names what they are of."""

    def __init__(self, source: str, kind: str = "trajectory") -> None:
        self.source, self.kind, self._position = source, kind, 0

    def next(self) -> Task:
        self._position += 1
        return Task(task_id=f"{self.kind}-{self._position - 1}", source=self.source, payload={})

    def give_back(self, task: Task, reason: str) -> None:
        """Nothing is lost: the next task asks for the same."""

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])
