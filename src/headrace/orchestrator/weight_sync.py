"""A weight ticket into live weights on every engine: prepare everywhere, interrupt as configured, commit everywhere.

Two phases. All live receivers `prepare` while they go on generating; then the gate closes if the interruption asks for
it; then all `commit`. The version is live when every receiver that is not fenced has acknowledged. Joins and syncs hold
one lock, so a joiner never misses a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.errors import BaseMissing, CallTimeout, NoEngines, PartFailed
from headrace.exchange.interruption import Interruption
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot, with_deadline
from headrace.types import NO_VERSION, WeightTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimes:
    """Seconds of one sync, by phase."""

    version: int
    prepare_s: float
    drain_s: float
    commit_s: float

    @property
    def total_s(self) -> float:
        return self.prepare_s + self.drain_s + self.commit_s


class WeightSync:
    """Keeps all engines of a dispatcher on one version. `scoring()` resolves once no score is in progress; `whole()` has the
    trainer send its last version at full scope."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        interruption: Interruption,
        *,
        prepare_timeout_s: float,
        commit_timeout_s: float,
        drain_timeout_s: float,
        scoring: Callable[[], Awaitable[None]],
        whole: Callable[[], Awaitable[WeightTicket]] | None = None,
    ) -> None:
        self.dispatcher, self.interruption, self.scoring = dispatcher, interruption, scoring
        self.prepare_timeout_s, self.commit_timeout_s = prepare_timeout_s, commit_timeout_s
        self.drain_timeout_s = drain_timeout_s
        self.whole = whole
        self.lock = asyncio.Lock()
        self.live_version = NO_VERSION
        self.ticket: WeightTicket | None = None
        """The newest: a joiner loads it, at full scope."""
        self.syncs = 0
        self.last: SyncTimes | None = None

    async def sync(self, ticket: WeightTicket) -> SyncTimes:
        """Make a ticket live on every engine. Raises `NoEngines` when none is left after it and none joins in time."""
        async with self.lock:
            self.ticket = ticket
            clock = asyncio.get_running_loop().time
            started = clock()
            await self._all(lambda slot: self._prepare(slot, ticket), self.prepare_timeout_s, "prepare")
            await self.dispatcher.hear()
            prepared = clock()
            if self.interruption.drain:
                self.dispatcher.close_gate()
                await self.drain()
            drained = clock()
            await self._all(lambda slot: self._commit(slot, ticket), self.commit_timeout_s, "commit")
            self.live_version = ticket.version
            self.syncs += 1
            self.last = SyncTimes(
                version=ticket.version,
                prepare_s=prepared - started,
                drain_s=drained - prepared,
                commit_s=clock() - drained,
            )
            self.dispatcher.open_gate()
        if not self.dispatcher.live():
            await self._wait_for_joiner()
        return self.last

    async def join(self, slot: EngineSlot) -> None:
        """Bring a new engine to the newest version and let it serve. Raises `PartFailed` when it cannot."""
        async with self.lock:
            if (ticket := self.ticket) is not None:
                if ticket.scope == "changed" and self.whole is not None:
                    ticket = await with_deadline(self.whole(), self.prepare_timeout_s, "trainer.republish")
                await with_deadline(slot.proxy.prepare(ticket), self.prepare_timeout_s, f"{slot.name}.prepare")
                await with_deadline(self._commit(slot, ticket), self.commit_timeout_s, f"{slot.name}.commit")
            self.dispatcher.join(slot)

    async def _prepare(self, slot: EngineSlot, ticket: WeightTicket) -> None:
        """With the weights whole for an engine that has not the version before."""
        try:
            await slot.proxy.prepare(ticket)
        except BaseMissing:
            if self.whole is None:
                raise
            await slot.proxy.prepare(await self.whole())

    async def _commit(self, slot: EngineSlot, ticket: WeightTicket) -> None:
        await slot.proxy.commit(ticket, self.interruption.running)
        slot.version = ticket.version

    async def _all(self, call: Callable[[EngineSlot], Awaitable[None]], seconds: float, phase: str) -> None:
        """Ask all live engines at once; one that fails or is late is fenced, the others do not wait for it longer."""

        async def one(slot: EngineSlot) -> None:
            try:
                await with_deadline(call(slot), seconds, f"{slot.name}.{phase}")
            except PartFailed as error:
                self.dispatcher.fence(slot, f"{phase}: {error}")

        await asyncio.gather(*(one(slot) for slot in self.dispatcher.live()))

    async def drain(self) -> None:
        """Wait for what runs on engines. Past the deadline the rest is aborted: a healthy engine is not given up for it."""
        try:
            await with_deadline(self.dispatcher.drained(), self.drain_timeout_s, "drain")
        except CallTimeout:
            await self.dispatcher.abort_all()
            await self.dispatcher.drained()
        if self.interruption.wait_scoring:
            await self.scoring()

    async def _wait_for_joiner(self) -> None:
        async def joined() -> None:
            while not self.dispatcher.live():
                await self.dispatcher.changed.wait()

        seconds = self.dispatcher.rejoin_timeout_s
        try:
            await with_deadline(joined(), seconds, "a replacement engine")
        except CallTimeout:
            raise NoEngines(f"no engine is left after a weight sync and none joined within {seconds:g} s") from None
