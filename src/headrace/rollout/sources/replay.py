"""Scored groups that were written earlier, as tasks whose rollout is to hand the group over (`--only train`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.protocols import Lease
from headrace.types import Group, Task


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
        return replace(group.task, payload={**group.task.payload, "group": group})

    def give_back(self, task: Task, reason: str) -> None:
        """Nothing to keep: the file still has it."""

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


async def replay(lease: Lease) -> Group:
    """The recorded group under the new lease's id."""
    return replace(lease.task.payload["group"], group_id=lease.lease_id)
