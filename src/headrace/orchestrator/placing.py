"""An actor into one whose trajectories stay where it has written them: its replies hold their places in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.exchange.stores.shared_memory import Arena, Placed
from headrace.protocols import TrajectoryRequest, WorkerContext
from headrace.types import Episodes


def build_placing(context: WorkerContext, build: Callable[..., Any], *args: Any) -> Placing:
    return Placing(build(context, *args))


class Placing:
    """For processes of one machine whose controller keeps units in a `SharedMemoryStore`. Everything else is the actor's own."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._arena = actor, Arena()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    async def generate(self, request: TrajectoryRequest) -> Placed | Episodes:
        made = await self._actor.generate(request)
        return made if isinstance(made, Episodes) else self._arena.place(made)

    async def close(self) -> None:
        await self._actor.close()
        self._arena.close()
