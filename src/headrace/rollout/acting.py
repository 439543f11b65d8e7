"""Turns what makes trajectories with a policy of its own into an engine: weights, aborts, figures and the timeline."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import msgspec
import numpy as np

from headrace.errors import HeadraceError, PartFailed
from headrace.policies.spaces import Spaces
from headrace.protocols import PauseMode, RunningPolicy, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.rollout.engines.policy_network import PolicyNetworkEngine
from headrace.types import EngineStats, Episodes, Event, Trajectory, WeightTicket

JOIN_S = 0.002
"""Pieces of work that follow one another within so long are one piece on the timeline."""
GENERATE_EVENT_S = 0.25
TURN_S = 0.002
"""Weights, stats and cancellations wait at most so long for a loop that steps (or for one step)."""
_TURNS = 5
"""Turns of the event loop that a call from another process needs from its bytes to its reply; with one each time it would
take ten milliseconds, and a sync, which is two calls, as long as a trajectory."""
_OF_EPISODES = 1 << 20
"""Index of the environments that play whole episodes: no actor has so high a number."""


class Acting:
    """The engine's face of an actor or of a policy worker. `generate` is the subclass's; it keeps `_requests` (ids to
    steps so far) and counts `_steps`."""

    def __init__(self, context: WorkerContext, env: EnvConfig, engine: PolicyNetworkEngine) -> None:
        self.context, self.env, self.engine = context, env, engine
        self._lock = asyncio.Lock()
        self._requests: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._steps = 0
        self._worked: tuple[int, int] | None = None
        self._turn_at = 0.0

    async def describe(self) -> Spaces:
        """What the environments show and take: the trainer builds its network from it."""
        return self.engine.spaces

    async def play(self, request: TrajectoryRequest) -> Episodes:
        """Whole episodes for `request.episodes`, beside the environments that trajectories come from."""
        from headrace.rollout.environments.gymnasium_vector import VectorEnvironment
        from headrace.rollout.episodes import play, shares

        wanted = request.episodes
        assert wanted is not None

        async def stepped(count: int) -> None:
            self._steps += count
            await self._give_way(request.request_id, self._requests[request.request_id] + 1)

        env = msgspec.structs.replace(self.env, count=min(wanted.count, self.env.count))
        self._requests[request.request_id] = 0
        try:
            async with self._lock:
                environments = VectorEnvironment(env, seed=wanted.seed, index=_OF_EPISODES)
                try:
                    return await play(
                        self.engine, environments, shares(wanted.count, env.count), wanted.greedy, wanted.seed, stepped
                    )
                finally:
                    environments.close()
        except HeadraceError:
            raise
        except Exception as error:
            raise PartFailed(f"{self.env.id} failed: {type(error).__name__}: {error}") from error
        finally:
            self._requests.pop(request.request_id, None)
            self._aborted.discard(request.request_id)

    async def _give_way(self, request_id: str, progress: int) -> None:
        """Let other calls through, every `TURN_S`. Raises `PartFailed` for a request that was aborted meanwhile."""
        if time.monotonic() < self._turn_at:
            return
        self._requests[request_id] = progress
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._turn_at = time.monotonic() + TURN_S
        if request_id in self._aborted:
            raise PartFailed(f"{request_id} was aborted")

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
