"""An event loop whose clock jumps to the next timer: the orchestrator's own code on virtual time.

`run_simulated(main)` is `asyncio.run` on that clock. When nothing is scheduled and nothing is ready, no event can ever
come: that is a deadlock, and it is raised as `Stalled` at once. Threads, executors, sockets and signals are refused,
because an answer from outside would arrive at a moment that the virtual clock knows nothing of.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from headrace.errors import Stalled

T = TypeVar("T")


class _VirtualSelector(selectors.BaseSelector):
    """A selector that waits by moving the clock."""

    def __init__(self) -> None:
        self.loop: SimulatedLoop | None = None
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # The loop's own wake-up pipe is registered once, before it has the loop, and never becomes readable.
        if self.loop is not None:
            raise Stalled("a socket or pipe was waited for on a simulated clock: real work has no place there")
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert self.loop is not None
        self.loop.advance(timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0. Timers due at the same moment run in the order in which they were set."""

    def __init__(self) -> None:
        selector = _VirtualSelector()
        self._now = 0.0
        self._timer_count = 0
        super().__init__(selector)
        selector.loop = self
        # The loop runs timers due before now + resolution, so an exact 0 would never run one due just now.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now

    def advance(self, timeout: float | None) -> None:
        """Move to the next timer. Raises `Stalled` when there is none."""
        if timeout is None:
            raise Stalled(f"nothing can happen any more at {self._now:.6f} simulated seconds: every part waits")
        if timeout > 0 and self._scheduled:  # type: ignore[attr-defined]
            # Set to the timer's own time, not advanced by a difference: rounding would miss the timer for ever.
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = _OrderedTimer(when, callback, args, self, context, self._timer_count)
        self._timer_count += 1
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True
        return timer

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise Stalled("an executor was asked for on a simulated clock: real work has no place there")

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise Stalled("a thread called into a simulated clock: real work has no place there")

    def add_signal_handler(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise Stalled("a signal handler was asked for on a simulated clock")


class _OrderedTimer(asyncio.TimerHandle):
    """Compares by time, then by when it was set."""

    __slots__ = ("_order",)

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Any, order: int) -> None:
        super().__init__(when, callback, args, loop, context)
        self._order = order

    def __lt__(self, other: Any) -> bool:
        return (self._when, self._order) < (other._when, other._order)


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
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        asyncio.set_event_loop(None)
        loop.close()
