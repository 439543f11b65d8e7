"""Turns requests to an engine into few messages, and what it says of their ends into replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.errors import PartFailed, WorkerDied
from headrace.protocols import Proxy
from headrace.signals import Signal, settle
from headrace.types import GenerateRequest, Generation

_BACKGROUND: dict[int, Any] = {}
"""Keeps fire-and-forget tasks alive: the event loop holds tasks weakly."""


def in_background(work: Any) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    _BACKGROUND[id(task)] = task
    task.add_done_callback(lambda done: _BACKGROUND.pop(id(done), None))
    return task


class Mailbox:
    """Requests to one engine in few messages: those of one turn of the event loop leave together, and what ends in one pass
    comes back together. A message costs more than what is in it.

    awaited: the reply to each request whose end was not told yet, whether or not its caller still waits
    changed: fires when one was told, or requests have left
    broken: told what went wrong when requests could not be handed over, or nobody knows what ends were lost
    """

    def __init__(self, proxy: Proxy, changed: Signal, broken: Callable[[Exception], None]) -> None:
        self._proxy, self._changed, self._broken = proxy, changed, broken
        self.awaited: dict[str, asyncio.Future[Generation]] = {}
        self._leaving: list[GenerateRequest] = []
        self._sending = 0
        self._listener: asyncio.Task[None] | None = None

    def ask(self, request: GenerateRequest) -> asyncio.Future[Generation]:
        loop = asyncio.get_running_loop()
        reply = self.awaited[request.request_id] = loop.create_future()
        self._leaving.append(request)
        if len(self._leaving) == 1:
            loop.call_soon(self._send)
        return reply

    async def sent(self) -> None:
        """Until the engine has all that it was asked: what is said of a request must not overtake it."""
        while self._leaving or self._sending:
            await self._changed.wait()

    def _send(self) -> None:
        requests, self._leaving = self._leaving, []
        if self._listener is None or self._listener.done():
            self._listener = in_background(self._listen())
        self._sending += 1
        in_background(self._submit(requests))

    async def _submit(self, requests: list[GenerateRequest]) -> None:
        try:
            await self._hand_over(requests)
        finally:
            self._sending -= 1
            self._changed.fire()

    async def _hand_over(self, requests: list[GenerateRequest]) -> None:
        try:
            await self._proxy.submit(requests)
        except WorkerDied as error:
            self._broken(error)
        except Exception as error:
            if isinstance(error, PartFailed) or len(requests) == 1:
                for request in requests:
                    self._end(request.request_id, error)
            else:  # one that cannot travel is no matter of the others'
                for request in requests:
                    await self._hand_over([request])

    async def _listen(self) -> None:
        try:
            while self.awaited:
                for request_id, result in await self._proxy.ended():
                    self._end(request_id, result)
        except Exception as error:
            self._broken(error)

    def _end(self, request_id: str, result: Generation | Exception) -> None:
        if (reply := self.awaited.pop(request_id, None)) is not None:
            settle(reply, result)
            self._changed.fire()
