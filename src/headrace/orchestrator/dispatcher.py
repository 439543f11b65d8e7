"""Generation requests into calls on engines: one front for all of them, with a gate, deadlines and fencing.

Requests are routed by what the dispatcher itself sent where (`routing`). A weight sync closes the gate: nothing new starts, what runs is the interruption's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.errors import CallTimeout, NoEngines, PartFailed, RequestRefused, WorkerDied
from headrace.orchestrator.mailbox import Mailbox, in_background
from headrace.orchestrator.routing import ROUTING
from headrace.protocols import Proxy
from headrace.rollout.engines.sequences import join_generations
from headrace.signals import Signal, settle
from headrace.types import NO_VERSION, EngineStats, GenerateRequest, Generation

T = TypeVar("T")


async def with_deadline(call: Awaitable[T], seconds: float, what: str) -> T:
    """The call's result, or `CallTimeout` naming it."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise CallTimeout(f"{what} gave no answer within {seconds:g} s") from None


@dataclass(slots=True, eq=False)
class Call:
    """A request that runs on an engine. asks: the task that asks for it alone, if one does"""

    reply: asyncio.Future[Generation]
    group_id: str
    asks: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine as the dispatcher knows it.

    together: it takes requests by `submit` and tells of ends by `ended`, many in one message
    calls: by request id
    moved_at: when it was last seen to make progress, or had nothing to do (seconds of the loop's clock)
    unknown: request ids to how many examinations in a row did not find them on the engine
    """

    name: str
    proxy: Proxy
    version: int = NO_VERSION
    together: bool = False
    fenced: bool = False
    calls: dict[str, Call] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)
    moved_at: float = 0.0
    unknown: Counter[str] = field(default_factory=Counter)
    mailbox: Mailbox | None = None
    """Made as it joins, for an engine that takes requests together."""

    def heard(self, stats: EngineStats) -> None:
        """Take in what the engine says of itself, whoever asked: tokens since the last word are progress."""
        before = self.stats
        moved = stats.generated_tokens > before.generated_tokens or stats.prompt_tokens > before.prompt_tokens
        if moved or stats.paused or not self.calls:
            self.moved_at = asyncio.get_running_loop().time()
        self.stats = stats


class Dispatcher:
    """Routes requests. `on_fenced(slot, reason)` is told of an engine that is given up, once."""

    def __init__(
        self,
        *,
        generate_timeout_s: float,
        rejoin_timeout_s: float,
        on_fenced: Callable[[EngineSlot, str], None] = lambda slot, reason: None,
        routing: str = "group",
    ) -> None:
        self.generate_timeout_s, self.rejoin_timeout_s = generate_timeout_s, rejoin_timeout_s
        self.on_fenced = on_fenced
        self.slots: dict[str, EngineSlot] = {}
        self.changed = Signal()
        """Fires when an engine joins or leaves, a call ends, or the gate moves."""
        self.ignored_replies = 0
        self.oldest: dict[str, int] | None = None
        """Group id -> version of its oldest token known, when somebody wants to know; whoever does takes ended groups out."""
        self._open = False
        self._closed_since: float | None = None
        self._closed_s = 0.0
        self._routing = ROUTING[routing]()

    # ----------------------------------------------------------------------------------------------- membership

    def live(self) -> list[EngineSlot]:
        return [slot for slot in self.slots.values() if not slot.fenced]

    def join(self, slot: EngineSlot) -> None:
        slot.moved_at = asyncio.get_running_loop().time()
        if slot.together:
            slot.mailbox = Mailbox(slot.proxy, self.changed, lambda error: self._broken(slot, error))
        self.slots[slot.name] = slot
        self.changed.fire()

    def fence(self, slot: EngineSlot, reason: str) -> None:
        """Give an engine up: its calls fail with `WorkerDied`, so their members try elsewhere."""
        if slot.fenced:
            return
        slot.fenced = True
        self.slots.pop(slot.name, None)
        for request_id in list(slot.calls):
            self._lose(slot, request_id)
        self.changed.fire()
        self.on_fenced(slot, reason)

    # -------------------------------------------------------------------------------------------------- the gate

    def close_gate(self) -> None:
        if self._open:
            self._open = False
            self._closed_since = asyncio.get_running_loop().time()

    def open_gate(self) -> None:
        if not self._open:
            self._open = True
            if self._closed_since is not None:
                self._closed_s += asyncio.get_running_loop().time() - self._closed_since
                self._closed_since = None
            self.changed.fire()

    def open_time(self) -> float:
        """Seconds on a clock that stands while the gate is closed: group timeouts are measured on it."""
        now = asyncio.get_running_loop().time()
        return (self._closed_since if self._closed_since is not None else now) - self._closed_s

    @property
    def gate_open(self) -> bool:
        return self._open

    def outstanding(self) -> int:
        """Requests that run on live engines; those held at the gate are not among them."""
        return sum(len(slot.calls) for slot in self.live())

    async def drained(self) -> None:
        while self.outstanding():
            await self.changed.wait()

    async def abort_all(self) -> None:
        """Hand back what still runs, as it is."""
        for slot in self.live():
            for request_id in list(slot.calls):
                await self._quietly(self._abort(slot, request_id))

    # ------------------------------------------------------------------------------------------------ generation

    async def generate(
        self, request: GenerateRequest, report: Callable[[Generation], None] | None = None
    ) -> Generation:
        """One sample; `report` gets its pieces as they are sampled. Raises `WorkerDied` when the engine is lost,
        `CallTimeout` when the reply is, `NoEngines` when nobody is left to ask."""
        request_id = request.request_id
        slot = await self._admitted(request)
        if request_id in slot.calls:
            raise RequestRefused(f"request {request_id} runs already; another one needs a key of its own")
        if slot.mailbox is not None and report is None:
            call = Call(slot.mailbox.ask(request), request.group_id)
        else:
            call = Call(asyncio.get_running_loop().create_future(), request.group_id)
            call.asks = in_background(self._ask(slot, call, request, report))
        slot.calls[request_id] = call
        self._routing.started(request, slot)
        if len(slot.calls) == 1:
            slot.moved_at = asyncio.get_running_loop().time()
        try:
            generation = await call.reply
            if self.oldest is not None and len(generation.policy_versions):
                self._note_token(request.group_id, int(generation.policy_versions.min()))
            return generation
        except asyncio.CancelledError:
            # The caller is cancelled: its group is closed, so nothing may go on running on an engine for it.
            if not slot.fenced:
                in_background(self._quietly(self._abort(slot, request_id)))
            raise
        finally:
            if call.asks is not None:
                call.asks.cancel()  # where no reply came, it is waited for no longer
            slot.calls.pop(request_id, None)
            slot.unknown.pop(request_id, None)
            self._routing.ended(request, slot)
            self.changed.fire()

    async def _ask(
        self, slot: EngineSlot, call: Call, request: GenerateRequest, report: Callable[[Generation], None] | None
    ) -> None:
        """One request in a message of its own."""
        try:
            asked = slot.proxy.generate(request) if report is None else _reported(slot.proxy, request, report)
            settle(call.reply, await asked)
        except WorkerDied as error:
            settle(call.reply, error)
            self.fence(slot, str(error))
        except Exception as error:
            settle(call.reply, error)

    def _lose(self, slot: EngineSlot, request_id: str) -> None:
        """No reply is waited for any more."""
        lost = WorkerDied(f"{slot.name} was given up while {request_id} ran on it")
        settle(slot.calls[request_id].reply, lost)

    def _broken(self, slot: EngineSlot, error: Exception) -> None:
        """Give up an engine whose mailbox fails, unless nobody is left who would miss it."""
        if slot.calls:
            for call in slot.calls.values() if not isinstance(error, WorkerDied) else ():
                settle(call.reply, error)  # who can say more than that it was given up, does
            self.fence(slot, str(error))

    async def _admitted(self, request: GenerateRequest) -> EngineSlot:
        """Wait for the gate and for an engine."""
        empty_since: float | None = None
        while True:
            if self._open and (slot := self._routing.pick(request, self.live())) is not None:
                # An end that is still to come would be taken for that of a request which has the name again.
                comes = slot.mailbox is not None and request.request_id in slot.mailbox.awaited
                if request.request_id in slot.calls or not comes:
                    return slot
            now = asyncio.get_running_loop().time()
            if not self.live():
                empty_since = now if empty_since is None else empty_since
                if now - empty_since >= self.rejoin_timeout_s:
                    raise NoEngines(f"no engine is left and none joined within {self.rejoin_timeout_s:g} s")
                self._wake_later(self.rejoin_timeout_s)
            await self.changed.wait()

    async def hear(self) -> None:
        """Ask all engines how they are when a swap is near, for the figures of steps that are quicker than the watch. The
        answers are waited for only where running groups are given up (`oldest`): which of them have a token of their
        engine's version is not sure afterwards."""
        asking = [in_background(self._hear(slot)) for slot in self.live()]
        if self.oldest is not None:
            await asyncio.gather(*asking)

    async def _hear(self, slot: EngineSlot) -> None:
        with contextlib.suppress(PartFailed):  # the swap that follows fences an engine that is gone
            slot.heard(await with_deadline(slot.proxy.stats(), self.generate_timeout_s, f"{slot.name}.stats"))
            for request_id, tokens in slot.stats.progress.items() if self.oldest is not None else ():
                if tokens and request_id in slot.calls:
                    self._note_token(slot.calls[request_id].group_id, slot.version)

    def _note_token(self, group_id: str, version: int) -> None:
        assert self.oldest is not None
        self.oldest[group_id] = min(version, self.oldest.get(group_id, version))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        pieces: asyncio.Queue[Generation | None] = asyncio.Queue()
        whole = asyncio.create_task(self.generate(request, pieces.put_nowait))
        whole.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            whole.result()
        finally:
            whole.cancel()

    async def abort(self, request_id: str, keep_kv: bool = False) -> Generation | None:
        for slot in self.live():
            if request_id in slot.calls:
                return await self._abort(slot, request_id, keep_kv)
        return None

    async def _abort(self, slot: EngineSlot, request_id: str, keep_kv: bool = False) -> Generation | None:
        if slot.mailbox is not None:
            await slot.mailbox.sent()
        return await slot.proxy.abort(request_id, keep_kv)

    # ------------------------------------------------------------------------------------------------- watchdog

    async def watch(self) -> None:
        """Ask engines how they are; fence one that does not answer or does not move, fail a call that it does not know.

        A call's deadline is counted from the last token that its engine made, so a request that waits in a busy
        engine's queue is safe and one whose reply was lost is not.
        """
        while True:
            await asyncio.sleep(self.generate_timeout_s / 4)
            for slot in self.live():
                await self._examine(slot)

    async def _examine(self, slot: EngineSlot) -> None:
        try:
            stats = await with_deadline(slot.proxy.stats(), self.generate_timeout_s, f"{slot.name}.stats")
        except PartFailed as error:
            self.fence(slot, str(error))
            return
        slot.heard(stats)
        if asyncio.get_running_loop().time() - slot.moved_at >= self.generate_timeout_s:
            self.fence(
                slot, f"{slot.name} made no token for {self.generate_timeout_s:g} s with {len(slot.calls)} requests"
            )
            return
        for request_id in list(slot.calls):
            slot.unknown[request_id] = 0 if request_id in stats.progress else slot.unknown[request_id] + 1
            if slot.unknown[request_id] >= 3:
                # The engine no longer knows the request and no reply came: it was lost on the way.
                self.ignored_replies += 1
                self._lose(slot, request_id)
                if slot.mailbox is not None:
                    slot.mailbox.awaited.pop(request_id, None)

    def _wake_later(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.changed.fire)

    async def _quietly(self, call: Awaitable[Any]) -> None:
        with contextlib.suppress(PartFailed):  # the engine is gone, and the request with it
            await with_deadline(call, self.generate_timeout_s, "abort")


async def _reported(proxy: Proxy, request: GenerateRequest, report: Callable[[Generation], None]) -> Generation:
    """The whole generation of a stream whose pieces are handed on."""
    pieces = [request.prefix] if request.prefix is not None else []
    async with contextlib.aclosing(proxy.stream(request)) as stream:  # type: ignore[type-var]
        async for piece in stream:
            pieces.append(piece)
            report(piece)
    return join_generations(pieces)
