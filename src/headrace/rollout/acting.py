"""Turns what makes trajectories with a policy of its own into an engine: weights, aborts, figures and the timeline."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np

from headrace.errors import PartFailed
from headrace.policies.spaces import Spaces
from headrace.protocols import PauseMode, RunningPolicy, WorkerContext
from headrace.rollout.engines.policy_network import PolicyNetworkEngine
from headrace.types import EngineStats, Event, Trajectory, WeightTicket

JOIN_S = 0.002
"""Pieces of work that follow one another within so long are one piece on the timeline."""
GENERATE_EVENT_S = 0.25


class Acting:
    """The engine's face of an actor or of a policy worker. `generate` is the subclass's; it keeps `_requests` (ids to
    steps so far) and counts `_steps`."""

    def __init__(self, context: WorkerContext, engine: PolicyNetworkEngine) -> None:
        self.context, self.engine = context, engine
        self._lock = asyncio.Lock()
        self._requests: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._steps = 0
        self._worked: tuple[int, int] | None = None

    async def describe(self) -> Spaces:
        """What the environments show and take: the trainer builds its network from it."""
        return self.engine.spaces

    async def abort(self, request_id: str, keep_kv: bool = False) -> None:
        """End a request. Half a trajectory is none, so nothing is handed back."""
        if request_id in self._requests:
            self._aborted.add(request_id)

    async def prepare(self, ticket: WeightTicket) -> None:
        await self._timed("prepare", ticket, self.engine.prepare(ticket))

    async def commit(self, ticket: WeightTicket, running: RunningPolicy = "go_on") -> None:
        """Between two steps: a trajectory goes on with the new weights, and each step names its version."""
        await self._timed("swap", ticket, self.engine.commit(ticket, running))

    async def pause(self, mode: PauseMode) -> None:
        await self._lock.acquire()

    async def resume(self) -> None:
        if self._lock.locked():
            self._lock.release()

    async def sleep(self, level: int) -> None:
        await self.engine.sleep(level)

    async def wake(self) -> None:
        await self.engine.wake()

    async def stats(self) -> EngineStats:
        self._flush_work()
        running = sum(1 for steps in self._requests.values() if steps)
        return dataclasses.replace(
            await self.engine.stats(),
            running=running,
            waiting=len(self._requests) - running,
            progress=dict(self._requests),
            generated_tokens=self._steps,
        )

    async def close(self) -> None:
        self._flush_work()

    async def _timed(self, kind: str, ticket: WeightTicket, call: Any) -> None:
        began = time.monotonic_ns()
        await call
        self.context.record(Event(began, self.context.name, kind, "", ticket.version, time.monotonic_ns() - began))

    def record_work(self, began_ns: int) -> None:
        """A piece of work that has just ended; those that follow one another closely become one event."""
        ended_ns = time.monotonic_ns()
        start_ns, last_ns = self._worked or (began_ns, began_ns)
        if began_ns - last_ns > JOIN_S * 1e9 or ended_ns - start_ns > GENERATE_EVENT_S * 1e9:
            self._flush_work()
            start_ns = began_ns
        self._worked = (start_ns, ended_ns)
        if not self._requests:  # nothing more to do for now
            self._flush_work()

    def _flush_work(self) -> None:
        if self._worked is not None:
            (start_ns, ended_ns), self._worked = self._worked, None
            version = self.engine.version
            self.context.record(Event(start_ns, self.context.name, "generate", "", version, ended_ns - start_ns))


def refuse_what_is_not_finite(name: str, trajectory: Trajectory) -> None:
    """NaN from an environment would be in every weight one update later."""
    arrays = {"reward": trajectory.rewards} | {f"observation {k!r}": v for k, v in trajectory.observations.items()}
    for what, values in arrays.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            t, n = np.argwhere(~np.isfinite(values.reshape(*values.shape[:2], -1)).all(-1))[0]
            raise PartFailed(f"{name} gave a {what} that is not finite (environment {n}, step {t} of the trajectory)")


def mix_seed(seed: int, index: int) -> int:
    """A seed of its own for a part."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
