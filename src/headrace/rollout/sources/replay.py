"""Scored groups that were written earlier, as tasks whose rollout is to hand the group over (`--only train`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.protocols import Lease
from headrace.types import Group, Task

PLACE = "headrace_replay"
"""Payload key: which of the groups a task stands for."""


class ReplaySource:
    """The groups of a reader, once and in their order; `groups` yields `Group`s."""

    def __init__(self, groups: Any) -> None:
        self._groups = list(groups)
        self._position = 0

    def next(self) -> Task | None:
        if self._position >= len(self._groups):
            return None
        group = self._groups[self._position]
        self._position += 1
        # The place, not the group: a checkpoint keeps the tasks that are under way.
        return replace(group.task, payload={**group.task.payload, PLACE: self._position - 1})

    def give_back(self, task: Task, reason: str) -> None:
        """Nothing to keep: the file still has it."""

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])

    async def rollout(self, lease: Lease) -> Group:
        """The recorded group under the new lease's id."""
        return replace(self._groups[lease.task.payload[PLACE]], group_id=lease.lease_id)
