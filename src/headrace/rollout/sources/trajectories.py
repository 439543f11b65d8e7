"""Turns nothing into tasks for ever: the task of an actor is to go on stepping, and no task differs from another."""

from __future__ import annotations

from typing import Any

from headrace.types import Task


class TrajectorySource:
    """One task a trajectory; `environment` names what is stepped."""

    def __init__(self, environment: str) -> None:
        self.environment, self._position = environment, 0

    def next(self) -> Task:
        self._position += 1
        return Task(task_id=f"trajectory-{self._position - 1}", source=self.environment, payload={})

    def give_back(self, task: Task, reason: str) -> None:
        """Nothing is lost: the next task asks for the same."""

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])
