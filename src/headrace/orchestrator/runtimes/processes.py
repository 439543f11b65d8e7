"""Turns a factory into a part in a process of its own, behind an awaitable proxy that speaks over a socketpair.

A worker starts from a fresh interpreter (as multiprocessing's "spawn" does), but through `subprocess`, because its
thread budget has to be in its environment before it imports anything, without touching this process's environment.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from multiprocessing import spawn as multiprocessing_spawn
from typing import Any

from headrace.errors import WorkerDied
from headrace.orchestrator.runtimes import frames
from headrace.orchestrator.runtimes.worker import STOP_SIGNALS, WorkerStart
from headrace.protocols import EventSink, Resources

CLOSE_TIMEOUT_S = 5.0
_EXIT_GRACE_S = 0.25
_COPY_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x400000:glibc.cpu.x86_rep_movsb_threshold=0x400000"
"""Copies of 4 MiB and more stream past the caches. By default the C library does so from some hundred MB on, and a
model's tensors, one by one, then travel at 0.6 of the speed of memory. Read at the start of a process only."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ProcessRuntime:
    """One process per part. `close_timeout_s` is how long a part may take to close before it is killed."""

    def __init__(self, record: EventSink, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._record = record
        self._close_timeout_s = close_timeout_s
        self._proxies: list[ProcessProxy] = []

    async def spawn(
        self, name: str, factory: Callable[..., Any], *args: Any, resources: Resources = Resources()
    ) -> ProcessProxy:
        """Start a process, build ``factory(context, *args)`` in it and wait until it is ready."""
        start = WorkerStart(name=name, build=frames.pack((factory, args, resources)), main=None)
        if b"__main__" in start.build:
            start = WorkerStart(name=name, build=start.build, main=_main_module(name))
        process, sock = _start_process(name, resources)
        proxy = ProcessProxy(name, process, self._record, self._close_timeout_s)
        self._proxies.append(proxy)
        try:
            await proxy._connect(sock, start)
        except BaseException:
            self._proxies.remove(proxy)
            await proxy.kill()
            raise
        return proxy

    async def close(self) -> None:
        for proxy in reversed(self._proxies):
            await proxy.close()
        self._proxies.clear()


class ProcessProxy:
    """A part in another process. A call goes on there when its caller is cancelled; its reply is counted and ignored."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], record: EventSink, close_timeout_s: float) -> None:
        self.name = name
        self.ignored_replies = 0
        self._process = process
        self._record = record
        self._close_timeout_s = close_timeout_s
        self._writer: frames.FrameWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._streams: frozenset[str] = frozenset()
        self._next_id = 1
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._items: dict[int, asyncio.Queue[tuple[int, Any]]] = {}
        self._ended: str | None = None
        self._closing = False
        self._exited = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._ended is None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone. Works on one that is stopped or busy, too."""
        self._process.kill()
        await self._wait_exit()
        self._end("it was closed" if self._closing else "it was killed by its controller")
        if self._listener is not None:
            await asyncio.wait([self._listener])

    async def close(self) -> None:
        """Let the part close, at most `close_timeout_s`; then kill it. An error in the part's own `close` goes to the
        loop's exception handler: the other parts still have to be closed."""
        if self._closing:
            await self._wait_exit()
            return
        if not self.alive or self._writer is None:  # it has no one to be asked through yet: it is being built
            await self.kill()
            return
        self._closing = True
        failure = None
        try:
            async with asyncio.timeout(self._close_timeout_s):
                failure = await self._request(frames.CLOSE, b"")
                await self._exited.wait()
        except (TimeoutError, WorkerDied):
            pass
        finally:
            await self.kill()
        if failure is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"closing {self.name} failed", "exception": frames.unpack_error(failure)}
            )

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        if method in self._streams:
            return lambda *args, **kwargs: self._stream(method, args, kwargs)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._request(frames.CALL, frames.pack((method, args, kwargs)))

        call.__name__ = method
        return call

    # ------------------------------------------------------------------------------------------------- calling

    async def _request(self, kind: int, payload: bytes) -> Any:
        call_id = await self._send(kind, payload)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            return await future
        finally:
            self._pending.pop(call_id, None)

    async def _send(self, kind: int, payload: bytes) -> int:
        """Write a frame and return its call id. Waits *before* writing while the pipe is full: a caller that gives up
        meanwhile has sent nothing, and a stopped worker costs no memory."""
        self._require_alive()
        assert self._writer is not None
        try:
            await self._writer.stream.drain()
        except OSError:
            await self._exited.wait()
        self._require_alive()
        call_id = self._next_id
        self._next_id += 1
        self._writer.write(kind, call_id, payload)
        return call_id

    async def _stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        call_id = await self._send(frames.STREAM, frames.pack((method, args, kwargs)))
        items = self._items[call_id] = asyncio.Queue()
        ended = False
        try:
            while True:
                kind, value = await items.get()
                ended = kind != frames.ITEM
                if kind == frames.ERROR:
                    raise value
                if ended:
                    return
                yield value
        finally:
            del self._items[call_id]
            if not ended and self._ended is None and self._writer is not None:
                self._writer.write(frames.STOP_STREAM, call_id, b"")

    def _require_alive(self) -> None:
        if self._ended is not None:
            raise WorkerDied(f"{self.name} is gone: {self._ended}")

    # ----------------------------------------------------------------------------------------------- listening

    async def _connect(self, sock: socket.socket, start: WorkerStart) -> None:
        reader, stream = await asyncio.open_connection(sock=sock, limit=frames.READ_AHEAD_BYTES)
        self._writer = frames.FrameWriter(stream)
        self._require_alive()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[0] = ready
        self._listener = asyncio.create_task(self._listen(reader))
        self._writer.write(frames.INIT, 0, frames.pack(start))
        try:
            self._streams = frozenset(await ready)
        finally:
            self._pending.pop(0, None)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        exit_watch = asyncio.create_task(self._watch_exit(reader))
        try:
            while True:
                kind, call_id, payload = await frames.read_frame(reader)
                self._receive(kind, call_id, payload)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            try:  # a moment for the kernel to say how it ended
                await asyncio.wait_for(self._exited.wait(), _EXIT_GRACE_S)
            except TimeoutError:
                self._process.kill()
            exit_watch.cancel()
            self._end(_how_it_ended(self._process.poll()))

    def _receive(self, kind: int, call_id: int, payload: bytes) -> None:
        try:
            value, events = frames.unpack(payload)
        except Exception as error:  # one reply that this process cannot rebuild fails one call
            kind, value, events = frames.ERROR, frames.pack_error(f"{self.name}: unreadable reply", error), []
        for event in events:
            self._record(event)
        if kind == frames.ERROR:
            value = frames.unpack_error(value)
        if kind == frames.EVENTS:
            return
        if (items := self._items.get(call_id)) is not None:
            items.put_nowait((kind, value))
        elif (future := self._pending.get(call_id)) is None or future.done():
            self.ignored_replies += kind != frames.ITEM
        elif kind == frames.ERROR:
            future.set_exception(value)
        else:
            future.set_result(value)

    async def _watch_exit(self, reader: asyncio.StreamReader) -> None:
        """End the listening also when a child of the worker keeps its end of the socket open."""
        await self._wait_exit()
        self._exited.set()
        await asyncio.sleep(_EXIT_GRACE_S)  # what it wrote before it ended is still in the socket
        if not reader.at_eof():
            reader.feed_eof()

    async def _wait_exit(self) -> None:
        """Until the process is gone, without a thread."""
        if self._process.poll() is not None:
            return
        if not hasattr(os, "pidfd_open"):
            while self._process.poll() is None:
                await asyncio.sleep(0.01)
            return
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self._process.pid)
        loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._process.poll()

    def _end(self, how: str) -> None:
        """Fail every pending and later call. The first reason stands."""
        if self._ended is not None:
            return
        self._ended = how
        died = f"{self.name} (pid {self._process.pid}) is gone: {how}"
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(WorkerDied(died))
        for items in self._items.values():
            items.put_nowait((frames.ERROR, WorkerDied(died)))
        if self._writer is not None:
            self._writer.stream.transport.abort()


def _start_process(name: str, resources: Resources) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the interpreter with its end of a socketpair; its threads are bounded before it imports anything."""
    ours, theirs = socket.socketpair()
    environment = {"GLIBC_TUNABLES": _COPY_TUNABLES, **os.environ}
    if resources.threads:
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(resources.threads)))
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from headrace.orchestrator.runtimes.worker import main; main({theirs.fileno()}, {os.getpid()})"
    )
    # The child inherits the blocked signals, so that one that comes before it can ignore them does not kill it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code, f"headrace:{name}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return process, ours


def _main_module(name: str) -> dict[str, Any]:
    """What a worker needs to import our own script, in multiprocessing's terms (so a script needs the same guard)."""
    data = multiprocessing_spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if key.startswith("init_main")}


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "its connection broke"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"it exited with code {code}"
