"""Turns a factory into a part that lives in this process, behind the same awaitable proxy as a part elsewhere.

No threads and no executors: everything runs as tasks of the caller's event loop, so it also runs on a virtual clock.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from headrace.errors import HeadraceError, PartFailed, WorkerDied
from headrace.protocols import EventSink, Resources, WorkerContext
from headrace.types import Event

_END = object()


class LocalRuntime:
    """Builds parts here. `resources.threads` is not applied: threads belong to the process, which the parts share."""

    def __init__(self, record: EventSink) -> None:
        self._record = record
        self._proxies: list[LocalProxy] = []

    async def spawn(
        self, name: str, factory: Callable[..., Any], *args: Any, resources: Resources = Resources()
    ) -> LocalProxy:
        """Build ``factory(context, *args)``; an awaitable result is awaited."""
        proxy = LocalProxy(name)

        def record(event: Event) -> None:
            if proxy.alive:  # a killed part's leftovers must not speak in the timeline
                self._record(event)

        try:
            part = factory(WorkerContext(name=name, record=record, resources=resources), *args)
            if inspect.isawaitable(part):
                part = await part
        except HeadraceError:
            raise
        except Exception as error:
            raise PartFailed(f"{name}: building it failed: {type(error).__name__}: {error}") from error
        proxy._part = part
        self._proxies.append(proxy)
        return proxy

    async def close(self) -> None:
        for proxy in reversed(self._proxies):
            await proxy.close()
        self._proxies.clear()


class LocalProxy:
    """A part in this process. As with a part elsewhere, a call goes on when its caller is cancelled, and its result is
    then counted and ignored."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ignored_replies = 0
        self._part: Any = None
        self._streams: dict[str, bool] = {}
        """Method -> whether it is an async generator: asking costs more than the rest of a call."""
        self._alive = True
        self._next_id = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._tasks: dict[int, asyncio.Future[Any]] = {}  # ordered, and strong: the loop holds tasks weakly

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def pid(self) -> int | None:
        return None

    async def kill(self) -> None:
        """Fail every pending call and cancel the part's own calls. What the part left running besides (a background
        task) can only be ended by its `close`, which is started and not waited for."""
        if not self._alive:
            return
        self._end(f"{self.name} was killed")
        self._start(self._close_part())

    async def close(self) -> None:
        """Let the part close. An error in its own `close` goes to the loop's exception handler."""
        if not self._alive:
            return
        await self._close_part()
        self._end(f"{self.name} was closed")

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        if method not in self._streams:
            self._streams[method] = inspect.isasyncgenfunction(getattr(self._part, method, None))
        if self._streams[method]:
            return lambda *args, **kwargs: self._stream(method, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(method, args, kwargs)

        call.__name__ = method
        self.__dict__[method] = call  # found without this function from the second call on
        return call

    # ------------------------------------------------------------------------------------------------- internals

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._require_alive()
        try:
            result = getattr(self._part, method)(*args, **kwargs)
        except HeadraceError:
            raise
        except asyncio.CancelledError:
            raise self._cancelled(method) from None
        except Exception as error:
            raise self._as_failure(method, error) from error
        if not inspect.isawaitable(result):
            return result
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call_id = self._start(result, partial(self._answer, method, future))
        self._pending[call_id] = future
        try:
            return await future
        finally:
            self._pending.pop(call_id, None)

    def _cancelled(self, method: str) -> PartFailed:
        return PartFailed(f"{self.name}.{method}: cancelled inside the part")

    def _answer(self, method: str, future: asyncio.Future[Any], ended: asyncio.Future[Any]) -> None:
        """Hand the part's own future on, unless nobody waits any more."""
        if ended.cancelled():
            failure = self._cancelled(method)
        else:
            error = ended.exception()
            failure = self._as_failure(method, error) if error is not None else None
        if future.done():
            self.ignored_replies += self._alive or not ended.cancelled()
        elif failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(ended.result())

    async def _stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        self._require_alive()
        items = getattr(self._part, method)(*args, **kwargs)
        try:
            while (item := await self._next_item(method, items)) is not _END:
                yield item
        finally:
            await items.aclose()

    async def _next_item(self, method: str, items: Any) -> Any:
        """The next item or _END; WorkerDied as soon as the part is killed."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def step() -> None:
            try:
                item = await anext(items, _END)
            except Exception as error:
                if not future.done():
                    future.set_exception(self._as_failure(method, error))
            else:
                if not future.done():
                    future.set_result(item)

        self._require_alive()
        call_id = self._start(step())
        self._pending[call_id] = future
        try:
            return await future
        except BaseException:
            if task := self._tasks.get(call_id):  # else the generator is still running when it is closed
                task.cancel()
                await asyncio.wait([task])
            raise
        finally:
            self._pending.pop(call_id, None)

    def _start(self, work: Any, told: Callable[[asyncio.Future[Any]], None] = lambda ended: None) -> int:
        """Work of the part's in a task of its own; `told` is called when it has ended."""
        call_id = self._next_id
        self._next_id += 1
        task = self._tasks[call_id] = asyncio.ensure_future(work)

        def end(ended: asyncio.Future[Any]) -> None:
            self._tasks.pop(call_id, None)
            told(ended)

        task.add_done_callback(end)
        return call_id

    async def _close_part(self) -> None:
        close = getattr(self._part, "close", None)
        if close is None:
            return
        try:
            result = close()
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"closing {self.name} failed", "exception": error}
            )

    def _end(self, reason: str) -> None:
        self._alive = False
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(WorkerDied(reason))
        self._pending.clear()
        for task in list(self._tasks.values()):
            if task is not asyncio.current_task():
                task.cancel()

    def _require_alive(self) -> None:
        if not self._alive:
            raise WorkerDied(f"{self.name} is gone")

    def _as_failure(self, method: str, error: Exception) -> HeadraceError:
        if isinstance(error, HeadraceError):
            return error
        failure = PartFailed(f"{self.name}.{method}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
