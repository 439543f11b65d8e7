"""Turns a factory into a part that is a Ray actor, on whichever machine of the cluster has what it needs.

The part answers as it does in a process of its own: the same frames, carried by Ray's calls. Ray only places it, starts it
and tells of its death; which part is replaced, and by what, stays the controller's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from headrace.errors import ConfigError, PartFailed, WorkerDied
from headrace.orchestrator.runtimes import frames
from headrace.orchestrator.runtimes.worker import FLUSH_EVENTS_S, calm_garbage_collection
from headrace.protocols import EventSink, Resources, WorkerContext

CLOSE_TIMEOUT_S = 5.0
SPAWN_TIMEOUT_S = 300.0
CALLS_AT_ONCE = 10_000
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RayRuntime:
    """One actor per part. Joins the cluster that Ray knows of (``RAY_ADDRESS``), else starts one on this machine, which ends
    with the runtime.

    On a cluster a part asks for as many CPUs as it has threads, and for its GPUs. On one's own machine parts share the
    cores as processes do, and only GPUs are claimed. What reaches one machine alone (a weight channel through shared memory) is
    refused to parts that were placed on several.
    """

    def __init__(
        self, record: EventSink, close_timeout_s: float = CLOSE_TIMEOUT_S, spawn_timeout_s: float = SPAWN_TIMEOUT_S
    ) -> None:
        self._record, self._close_timeout_s, self._spawn_timeout_s = record, close_timeout_s, spawn_timeout_s
        self._proxies: list[RayProxy] = []
        self._started = self._joined = False
        self._nodes: dict[
            str, str
        ] = {}  # where parts are that hold what reaches one machine alone -> the first of them

    async def spawn(
        self, name: str, factory: Callable[..., Any], *args: Any, resources: Resources = Resources()
    ) -> RayProxy:
        """Place an actor, build ``factory(context, *args)`` in it and wait until it is ready."""
        self._start()
        threads = dict.fromkeys(_THREAD_VARIABLES, str(resources.threads)) if resources.threads else {}
        actor = _Part.options(  # type: ignore[attr-defined]
            name=f"{name} {secrets.token_hex(4)}",
            num_cpus=resources.threads if self._joined else 0,
            num_gpus=resources.gpus,
            max_concurrency=CALLS_AT_ONCE,
            max_restarts=0,
            runtime_env={"env_vars": threads},
        ).remote()
        proxy = RayProxy(name, actor, self._record, self._close_timeout_s)
        self._proxies.append(proxy)
        try:
            async with asyncio.timeout(self._spawn_timeout_s):
                node = await proxy._build(frames.pack((name, factory, args, resources)))
            self._refuse_several_machines(name, node, args)
        except BaseException as error:
            self._proxies.remove(proxy)
            await proxy.kill()
            if isinstance(error, TimeoutError):
                free = {kind: ray.available_resources().get(kind, 0) for kind in ("CPU", "GPU")}
                wanted = f"{resources.threads} CPUs and {resources.gpus:g} GPUs"
                raise PartFailed(
                    f"{name} was not ready within {self._spawn_timeout_s:g} s; it asks for {wanted}, "
                    f"the cluster has {free['CPU']:g} and {free['GPU']:g} free"
                ) from None
            raise
        return proxy

    def _refuse_several_machines(self, name: str, node: str, args: tuple[Any, ...]) -> None:
        if not any(getattr(arg, "one_machine", False) for arg in args):
            return
        self._nodes.setdefault(node, name)
        if len(self._nodes) > 1:
            raise ConfigError(
                "weights.channel",
                f"it goes through the memory of one machine, but Ray has placed {' and '.join(self._nodes.values())} on "
                "different ones; use collective or http with weights.address, or filesystem with a shared folder",
            )

    async def close(self) -> None:
        for proxy in reversed(self._proxies):
            await proxy.close()
        self._proxies.clear()
        if self._started:
            self._started = False
            ray.shutdown()

    def _start(self) -> None:
        """Blocks for some seconds, once."""
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it here alone, and would report to its makers
        self._joined = bool(os.environ.get("RAY_ADDRESS"))
        ray.init(include_dashboard=False, configure_logging=False, logging_level="ERROR")
        self._started = True


class RayProxy:
    """A part in an actor. A call goes on there when its caller is cancelled; its reply is counted and ignored."""

    def __init__(self, name: str, actor: Any, record: EventSink, close_timeout_s: float) -> None:
        self.name = name
        self.ignored_replies = 0
        self._actor, self._record, self._close_timeout_s = actor, record, close_timeout_s
        self._pid: int | None = None
        self._streams: frozenset[str] = frozenset()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._ended: str | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._ended is None

    @property
    def pid(self) -> int | None:
        return self._pid

    async def kill(self) -> None:
        """At once, without asking it."""
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)
        self._end("it was killed by its controller")
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Let the part close, at most `close_timeout_s`; then end the actor. An error in the part's own `close` goes to
        the loop's exception handler."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._ended is not None:
            return
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._ask("close")
        except (TimeoutError, WorkerDied):
            pass
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"closing {self.name} failed", "exception": error}
            )
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor, no_restart=True)
        self._end("it was closed")

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        if method in self._streams:
            return lambda *args, **kwargs: self._stream(method, args, kwargs)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._ask("call", frames.pack((method, args, kwargs)))

        call.__name__ = method
        return call

    # ------------------------------------------------------------------------------------------------- internals

    async def _build(self, start: bytes) -> str:
        """The node of the cluster that it runs on."""
        self._pid, streams, node = await self._ask("build", sys.path, start)
        self._streams = frozenset(streams)
        self._listener = asyncio.create_task(self._listen(), name=f"listen to {self.name}")
        return node

    async def _ask(self, method: str, *args: Any) -> Any:
        """One call of the actor, as a future that also the actor's end resolves."""
        if self._ended is not None:
            raise WorkerDied(f"{self.name} is gone: {self._ended}")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call_id = next(self._ids)
        self._pending[call_id] = future
        reader = asyncio.create_task(self._read(getattr(self._actor, method).remote(*args), future))
        self._readers[call_id] = reader
        reader.add_done_callback(lambda _: self._readers.pop(call_id, None))
        try:
            return await future
        finally:
            self._pending.pop(call_id, None)

    async def _read(self, reference: Any, future: asyncio.Future[Any]) -> None:
        try:
            kind, payload = await reference
            value, events = frames.unpack(payload)
            for event in events:
                self._record(event)
            failure = frames.unpack_error(value) if kind == frames.ERROR else None
        except RayActorError as error:
            self._end(f"its actor died ({_line(error)})")
            return
        except Exception as error:  # one reply that cannot be carried or rebuilt fails one call
            value, failure = None, PartFailed(f"{self.name}: unreadable reply: {_line(error)}")
        if future.done():
            self.ignored_replies += 1
        elif failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(value)

    async def _stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        stream_id = next(self._ids)
        await self._ask("open_stream", stream_id, frames.pack((method, args, kwargs)))
        ended = False
        try:
            while not ended:
                items, ended = await self._ask("next_items", stream_id)
                for item in items:
                    yield item
        finally:
            if not ended and self._ended is None:
                self._actor.stop_stream.remote(stream_id)

    async def _listen(self) -> None:
        """Events that nobody asked for, and the actor's death."""
        with contextlib.suppress(WorkerDied):
            while True:
                await self._ask("wait_for_events")

    def _end(self, how: str) -> None:
        """Fail every pending and later call. The first reason stands."""
        if self._ended is not None:
            return
        self._ended = how
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(WorkerDied(f"{self.name} is gone: {how}"))
        current = asyncio.current_task()
        for task in [*self._readers.values(), self._listener]:
            if task is not None and task is not current:
                task.cancel()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


@ray.remote
class _Part:
    """The actor: one asyncio loop, in which async methods of the part interleave and sync ones run inline."""

    def __init__(self) -> None:
        self.name = ""
        self.part: Any = None
        self.events: list[Any] = []
        self.streams: dict[int, tuple[asyncio.Task[None], asyncio.Queue[tuple[bool, Any]]]] = {}

    async def build(self, path: list[str], start: bytes) -> tuple[int, bytes]:
        """path: where the controller finds modules, for those that this machine has too."""
        sys.path.extend(folder for folder in path if folder not in sys.path)
        name = "part"
        try:
            name, factory, args, resources = frames.unpack(start)
            self.name = name
            context = WorkerContext(name=name, record=self.events.append, resources=resources)
            part = factory(context, *args)
            self.part = await part if inspect.isawaitable(part) else part
            if resources.threads and (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(resources.threads)
        except Exception as error:
            return self.answer(frames.ERROR, frames.pack_error(f"{name}: building it failed", error))
        streams = [
            method
            for method in dir(type(self.part))
            if not method.startswith("_") and inspect.isasyncgenfunction(getattr(type(self.part), method))
        ]
        calm_garbage_collection()
        return self.answer(frames.READY, (os.getpid(), streams, ray.get_runtime_context().get_node_id()))

    async def call(self, payload: bytes) -> tuple[int, bytes]:
        method = "call"
        try:
            method, args, kwargs = frames.unpack(payload)
            result = getattr(self.part, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            return self.answer(frames.RESULT, result)
        except (Exception, asyncio.CancelledError) as error:
            return self.answer(frames.ERROR, frames.pack_error(f"{self.name}.{method}", error))

    async def open_stream(self, stream_id: int, payload: bytes) -> tuple[int, bytes]:
        items: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue()
        self.streams[stream_id] = (asyncio.create_task(self.pump(payload, items)), items)
        return self.answer(frames.RESULT, None)

    async def pump(self, payload: bytes, items: asyncio.Queue[tuple[bool, Any]]) -> None:
        """A stream's items into its queue; the last entry says that it ended, and with which error if any."""
        method, failure = "stream", None
        try:
            method, args, kwargs = frames.unpack(payload)
            async with contextlib.aclosing(getattr(self.part, method)(*args, **kwargs)) as stream:
                async for item in stream:
                    items.put_nowait((False, item))
                    await asyncio.sleep(0)
        except Exception as error:
            failure = frames.pack_error(f"{self.name}.{method}", error)
        items.put_nowait((True, failure))

    async def next_items(self, stream_id: int) -> tuple[int, bytes]:
        """What has come since the last call, at least one item or the end: (items, ended)."""
        _, queue = self.streams[stream_id]
        found = [await queue.get()]
        while not queue.empty() and not found[-1][0]:
            found.append(queue.get_nowait())
        ended, failure = found[-1]
        if ended and failure is not None and len(found) == 1:
            del self.streams[stream_id]
            return self.answer(frames.ERROR, failure)
        if ended and failure is not None:  # first the items before it
            queue.put_nowait(found.pop())
            ended = False
        if ended:
            del self.streams[stream_id]
            found.pop()
        return self.answer(frames.RESULT, ([item for _, item in found], ended))

    async def stop_stream(self, stream_id: int) -> None:
        if (stream := self.streams.pop(stream_id, None)) is not None:
            stream[0].cancel()

    async def wait_for_events(self) -> tuple[int, bytes]:
        for _ in range(60):
            await asyncio.sleep(FLUSH_EVENTS_S)
            if self.events:
                break
        return self.answer(frames.EVENTS, None)

    async def close(self) -> tuple[int, bytes]:
        try:
            closing = getattr(self.part, "close", None)
            result = closing() if closing is not None else None
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            return self.answer(frames.ERROR, frames.pack_error(f"{self.name}.close", error))
        return self.answer(frames.CLOSED, None)

    def answer(self, kind: int, value: Any) -> tuple[int, bytes]:
        """Every answer carries the events recorded since the last one."""
        count = len(self.events)
        payload = frames.pack((value, self.events[:count]))  # raises for a result that cannot travel
        del self.events[:count]
        return kind, payload
