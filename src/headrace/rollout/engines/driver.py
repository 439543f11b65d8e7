"""Turns awaited calls into work of a core: its passes run in a thread of their own, or inline between the loop's turns."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from headrace.cores import use_threads, work_beside
from headrace.errors import HeadraceError, PartFailed
from headrace.protocols import PauseMode, RunningPolicy
from headrace.rollout.engines.core import Core, Reporter
from headrace.rollout.engines.sequences import Sequence as Running
from headrace.signals import Signal, settle
from headrace.types import EngineStats, GenerateRequest, Generation, WeightTicket

T = TypeVar("T")


class EngineDriver:
    """`protocols.TextEngine` over a `Core`.

    In a thread the loop stays answerable during a pass. Inline, a pass runs in the loop and gives way after it, so a
    single-process run repeats bit for bit.
    """

    def __init__(self, core: Core, *, inline: bool = False, threads: int = 0) -> None:
        self.core, self.inline, self.threads = core, inline, threads
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pump: asyncio.Task[None] | None = None
        self._lock: asyncio.Lock | None = None
        self._drain_waiters: list[Callable[[], None]] = []
        self._ends: list[tuple[str, Generation | HeadraceError]] = []
        self._has_ended = Signal()
        self._news: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        """What the thread has to say in each loop, once it is through with the command or the pass in hand."""
        self._failure: Exception | None = None
        self._closing = self._closed = False
        if not inline:
            stand_back = partial(_stand_back, min(threads, 1), lambda: bool(core.running) and core.ready)
            self._beside = ThreadPoolExecutor(1, f"{core.context.name}-weights", stand_back)
            self._thread = threading.Thread(target=self._work, name=f"{core.context.name}-passes", daemon=True)
            self._thread.start()

    # -------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerateRequest) -> Generation:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Generation] = loop.create_future()
        self._check()
        self._post(partial(self._open, loop, request, partial(settle, done)))
        try:
            return await done
        except asyncio.CancelledError:
            # Nobody waits any more: a request that ran on would hold keys and values for no lease.
            self._post(lambda: self.core.cancel(request))
            raise

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._check()
        loop = asyncio.get_running_loop()

        def open_all() -> None:
            for request in requests:
                self._open(loop, request, partial(self._note_end, request.request_id))

        self._post(open_all)

    async def ended(self) -> list[tuple[str, Generation | HeadraceError]]:
        while not self._ends:
            if self._closed or not self._closing:  # one that closes still tells the ends of what it had
                self._check()
            await self._has_ended.wait()
        ends, self._ends = self._ends, []
        return ends

    def _note_end(self, request_id: str, result: Generation | HeadraceError) -> None:
        self._ends.append((request_id, result))
        self._has_ended.fire()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Pieces of new tokens; a piece that is not the last one carries finish_reason "abort", as if it was cut there."""
        seen = request.prefix.token_ids.size if request.prefix is not None else 0
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Generation | None] = asyncio.Queue()
        done: asyncio.Future[Generation] = loop.create_future()

        def end(result: Generation | HeadraceError) -> None:
            settle(done, result)
            pieces.put_nowait(None)

        def report(piece: Generation) -> None:
            self._into(loop, partial(pieces.put_nowait, piece))

        self._check()
        self._post(partial(self._open, loop, request, end, report))
        try:
            while (piece := await pieces.get()) is not None:
                seen += piece.token_ids.size
                yield piece
            yield _tail(await done, seen)
        finally:
            self._post(lambda: self.core.cancel(request))

    def _open(
        self,
        loop: asyncio.AbstractEventLoop,
        request: GenerateRequest,
        end: Callable[[Generation | HeadraceError], None],
        report: Reporter | None = None,
    ) -> None:
        """Hand a request to the core, whose thread this is; `end` is called in the loop."""

        def tell(sequence: Running, error: Exception | None) -> None:
            self._into(loop, lambda: end(self._result(sequence, error)))

        try:
            self._check()
            self.core.submit(request, tell, report)
        except Exception as error:
            self._into(loop, partial(end, self._as_ours(error)))

    def _result(self, sequence: Running, error: Exception | None) -> Generation | HeadraceError:
        if error is None:
            try:
                return sequence.generation()
            except Exception as raised:
                error = raised
        return self._as_ours(error)

    def _as_ours(self, error: Exception) -> HeadraceError:
        if isinstance(error, HeadraceError):
            return error
        trace = "".join(traceback.format_exception(error)).rstrip()  # its cause would not travel
        return PartFailed(f"{self.core.context.name}: {type(error).__name__}: {error}\n{trace}")

    async def abort(self, request_id: str, keep_kv: bool = False) -> Generation | None:
        return await self._call(lambda: self.core.abort(request_id, keep_kv))

    # --------------------------------------------------------------------------------------------------- weights

    async def prepare(self, ticket: WeightTicket) -> None:
        async with self._weights_lock():
            await self._prepare(ticket)

    async def commit(self, ticket: WeightTicket, running: RunningPolicy = "go_on") -> None:
        async with self._weights_lock():
            await self._prepare(ticket)
            await self._call(lambda: self.core.swap(ticket.version, running))

    async def _prepare(self, ticket: WeightTicket) -> None:
        if not await self._call(lambda: self.core.wanted(ticket)):
            return
        if self.inline:
            weights = self.core.prepare_weights(ticket)
        else:
            work = partial(self.core.prepare_weights, ticket)
            weights = await asyncio.get_running_loop().run_in_executor(self._beside, work)
        await self._call(lambda: self.core.stage(ticket.version, weights))

    def _weights_lock(self) -> asyncio.Lock:
        """One prepare or commit at a time. Made at the first use, inside the loop that it belongs to."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    # -------------------------------------------------------------------------------------------- pause and sleep

    async def pause(self, mode: PauseMode) -> None:
        loop = asyncio.get_running_loop()
        drained = loop.create_future()

        def apply() -> None:
            self.core.pause(mode)
            if mode != "wait" or self.core.drained:
                self._into(loop, lambda: _resolve(drained))
            else:
                self._drain_waiters.append(lambda: self._into(loop, lambda: _resolve(drained)))

        await self._call(apply)
        await drained

    async def resume(self) -> None:
        def apply() -> None:
            self.core.resume()
            self._wake_drained()

        await self._call(apply)

    async def sleep(self, level: int) -> None:
        await self._call(lambda: self.core.sleep(level))

    async def wake(self) -> None:
        await self._call(self.core.wake)

    async def fingerprint(self) -> str:
        """sha256 over the live weights (`models.weights_digest`): the trainer's own, once its version is live."""
        return await self._call(self.core.fingerprint)

    async def stats(self) -> EngineStats:
        self._check()  # whoever looks at what an engine does has to see that it does nothing any more
        return self.core.stats()

    async def close(self) -> None:
        """Hand back what runs and end the thread."""
        if self._closing:
            return
        self._closing = True  # from here on nothing is taken on: it would be left behind
        with contextlib.suppress(HeadraceError):
            await self._command(lambda: self.core.fail_all(PartFailed("the engine was closed")))
            await self._command(self.core.flush_events)
        self._closed = True
        self._has_ended.fire()
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)
            self._beside.shutdown(wait=False)
        if self._pump is not None:
            self._pump.cancel()
        await asyncio.sleep(0)

    # ------------------------------------------------------------------------------------------------ the machinery

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the core between two passes."""
        self._check()
        return await self._command(work)

    async def _command(self, work: Callable[[], T]) -> T:
        if self.inline:
            result = work()
            self._wake_drained()
            self._start_pump()
            return result
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = work()
            except Exception as error:
                self._into(loop, lambda error=error: None if future.done() else future.set_exception(error))
            else:
                self._into(loop, lambda: None if future.done() else future.set_result(result))

        self._commands.put(command)
        return await future

    def _post(self, work: Callable[[], Any]) -> None:
        """As `_call`, without waiting or caring."""
        if self._closing or self._failure is not None:
            return
        if self.inline:
            work()
            self._wake_drained()
            self._start_pump()
        else:
            self._commands.put(work)

    def _check(self) -> None:
        if self._failure is not None:
            raise PartFailed(f"{self.core.context.name} has failed: {self._failure}") from self._failure
        if self._closing:
            raise PartFailed(f"{self.core.context.name} is closed")

    def _into(self, loop: asyncio.AbstractEventLoop, apply: Callable[[], None]) -> None:
        if self.inline:
            apply()
        else:
            self._news.setdefault(loop, []).append(apply)

    def _tell_news(self) -> None:
        """All that one pass has to say wakes a loop once: each wake-up is a call of the kernel and a change of threads."""
        news, self._news = self._news, {}
        for loop, words in news.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_say, words)

    def _work(self) -> None:
        """The thread: commands first, then a pass, for ever."""
        use_threads(self.threads)
        while True:
            try:
                idle = not (self._failure is None and self.core.ready)
                if idle:
                    self.core.flush_events()
                command = self._commands.get(block=idle)
                if command is None:
                    return
                command()
                self._wake_drained()
                self._tell_news()
                continue
            except queue.Empty:
                pass
            self._pass()
            self._tell_news()

    def _start_pump(self) -> None:
        if (self._pump is None or self._pump.done()) and self._failure is None and self.core.ready:
            self._pump = asyncio.get_running_loop().create_task(self._run_inline(), name=self.core.context.name)

    async def _run_inline(self) -> None:
        while not self._closed and self._failure is None and self.core.ready:
            self._pass()
            await asyncio.sleep(0)
        self.core.flush_events()

    def _pass(self) -> None:
        try:
            self.core.step()
        except Exception as error:
            # Whatever it was, the caches may be half written: no later pass can be trusted.
            self._failure = error
            failed = PartFailed(f"{self.core.context.name} failed in a forward pass: {error!r}")
            failed.__cause__ = error
            self.core.fail_all(failed)
        self._wake_drained()

    def _wake_drained(self) -> None:
        if self._drain_waiters and (self.core.drained or self.core.paused is None or self._failure is not None):
            waiters, self._drain_waiters = self._drain_waiters, []
            for wake in waiters:
                wake()


def _stand_back(threads: int, busy: Callable[[], bool]) -> None:
    """Of the thread that prepares weights while passes go on: one core, or the products of both would wait for each other."""
    use_threads(threads)
    work_beside(busy)


def _say(words: list[Callable[[], None]]) -> None:
    for word in words:
        try:
            word()
        except Exception as error:  # what the others wait for is still to be said
            asyncio.get_running_loop().call_exception_handler({"message": "an engine's news", "exception": error})


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _tail(generation: Generation, seen: int) -> Generation:
    """The part of a generation after the first `seen` tokens."""
    from dataclasses import replace

    from headrace.rollout.engines.sequences import join_masks, split_masks

    mask = generation.sampling_mask
    return replace(
        generation,
        token_ids=generation.token_ids[seen:],
        logprobs=generation.logprobs[seen:],
        policy_versions=generation.policy_versions[seen:],
        sampling_mask=join_masks(split_masks(mask)[seen:]) if mask is not None else None,
        expert_routing=generation.expert_routing[seen:] if generation.expert_routing is not None else None,
    )
