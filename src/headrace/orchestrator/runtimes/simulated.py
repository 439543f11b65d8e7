"""An event loop whose clock jumps to the next timer: the orchestrator's own code on virtual time.

`run_simulated(main)` is `asyncio.run` on that clock. When nothing is scheduled and nothing is ready, no event can ever
come: that is a deadlock, and it is raised as `Stalled` at once. Threads, executors, sockets and signals are refused,
because an answer from outside would arrive at a moment that the virtual clock knows nothing of.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from headrace.errors import Stalled

T = TypeVar("T")


class _NoSelector(selectors.BaseSelector):
    """Holds the loop's own wake-up pipe, which is registered once and never becomes readable; nothing is ever waited for."""

    def __init__(self) -> None:
        self.closed_to_others = False
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.closed_to_others:
            raise Stalled("a socket or pipe was waited for on a simulated clock: real work has no place there")
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> NoReturn:
        raise Stalled("a simulated clock has nothing to wait for")

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0. Timers due at the same moment run in the order in which they were set.

    It has a `_run_once` of its own: with no files to wait for, an iteration is a look at two queues, and simulated days are
    nothing but iterations.
    """

    def __init__(self) -> None:
        selector = _NoSelector()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap of (time, when it was set, timer)."""
        self._timer_count = self._cancelled_timers = 0
        super().__init__(selector)
        selector.closed_to_others = True

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """Everything that is ready; when nothing is, the clock moves to the next timer. Raises `Stalled` without any."""
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        if 2 * self._cancelled_timers > len(timers) + 100:
            timers[:] = [timer for timer in timers if not timer[2]._cancelled]  # type: ignore[attr-defined]
            heapq.heapify(timers)
            self._cancelled_timers = 0
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
                self._cancelled_timers -= 1
            if not timers:
                raise Stalled(f"nothing can happen any more at {self._now:.6f} simulated seconds: every part waits")
            # Set to the timer's own time, not advanced by a difference: rounding would miss the timer for ever.
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                self._cancelled_timers -= isinstance(handle, asyncio.TimerHandle)
            else:
                handle._run()

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise Stalled("an executor was asked for on a simulated clock: real work has no place there")

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise Stalled("a thread called into a simulated clock: real work has no place there")

    def add_signal_handler(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise Stalled("a signal handler was asked for on a simulated clock")


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a fresh virtual clock; an exception in any callback fails it."""
    loop = SimulatedLoop()
    failures: list[BaseException] = []

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "exception" in context:
            failures.append(context["exception"])

    loop.set_exception_handler(on_error)
    try:
        asyncio.set_event_loop(loop)
        result = loop.run_until_complete(main)
        if failures:
            raise failures[0]
        return result
    except BaseException:
        # What is thrown away unended would complain, coroutine by coroutine, that its loop is gone.
        running = asyncio.all_tasks(loop)
        for task in running:
            task.cancel()
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        raise
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        asyncio.set_event_loop(None)
        loop.close()
