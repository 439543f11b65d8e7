"""Waiting for "something changed" on one event loop, in an order that repeats, and for answers of which the first counts."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Signal:
    """Wakes everybody who waits, each time it fires; in the order in which they came, so a run repeats."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[bool]] = deque()

    async def wait(self, seconds: float | None = None) -> bool:
        """True once it fires, False when `seconds` have passed before that."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiters.append(future)
        if seconds is None:
            return await future
        timer = loop.call_later(max(0.0, seconds), _answer, future, False)
        try:
            return await future
        finally:
            timer.cancel()

    def fire(self) -> None:
        while self._waiters:
            _answer(self._waiters.popleft(), True)


def _answer(future: asyncio.Future[bool], fired: bool) -> None:
    if not future.done():
        future.set_result(fired)


def settle(reply: asyncio.Future[Any], result: Any) -> None:
    """Give a reply its result, an exception too, unless it has one."""
    if reply.done():
        return
    if isinstance(result, Exception):
        reply.set_exception(result)
        reply.exception()  # seen: nobody may wait for it any more
    else:
        reply.set_result(result)
