"""Turns a fresh Python process into a part: builds it from its factory and answers calls from its controller's socket.

The worker has one asyncio loop. Async methods of the part interleave, sync methods run inline, in order of arrival.
It lives no longer than its controller: end of file on the socket ends it, and so does the kernel if it is too busy to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from headrace.orchestrator.runtimes import frames

FLUSH_EVENTS_S = 0.5
_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker is told first. `build` is the pickled (factory, args, resources); `main` what multiprocessing needs
    to import the controller's own script, when the factory comes from there."""

    name: str
    build: bytes
    main: dict[str, Any] | None


def main(socket_fd: int, controller_pid: int) -> None:
    """Entry point of the process; returns when the controller closes it."""
    for number in STOP_SIGNALS:
        # They reach the whole group, and the controller decides. Not SIG_IGN, which a user's own subprocesses would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != controller_pid:  # it died before the line above
        os._exit(1)
    try:
        asyncio.run(_Worker().serve(socket.socket(fileno=socket_fd)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # a part's stray thread must not keep a closed worker alive


def calm_garbage_collection() -> None:
    """Once a process is built: what is loaded stays, so it is never searched again, and the rest more rarely. With torch
    in memory the default thresholds cost a quarter of the controller's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


class _Worker:
    def __init__(self) -> None:
        self.name = ""
        self.part: Any = None
        self.events: list[Any] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.writer: frames.FrameWriter

    async def serve(self, sock: socket.socket) -> None:
        reader, stream = await asyncio.open_connection(sock=sock, limit=frames.READ_AHEAD_BYTES)
        self.writer = frames.FrameWriter(stream)
        try:
            _, _, payload = await frames.read_frame(reader)
            if not await self.build(frames.unpack(payload)):
                return
            flusher = asyncio.create_task(self.flush_events_for_ever())
            await self.answer(reader)
            flusher.cancel()
        except (asyncio.IncompleteReadError, OSError):
            os._exit(1)  # the controller is gone: nobody is left to clean up for

    async def build(self, start: WorkerStart) -> bool:
        from headrace.protocols import WorkerContext

        self.name = start.name
        try:
            if start.main is not None:
                from multiprocessing import spawn

                spawn.prepare(start.main)
            factory, args, resources = frames.unpack(start.build)
            context = WorkerContext(name=start.name, record=self.events.append, resources=resources)
            part = factory(context, *args)
            self.part = await part if inspect.isawaitable(part) else part
            if resources.threads and (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(resources.threads)
        except Exception as error:
            self.send(frames.ERROR, 0, frames.pack_error(f"{start.name}: building it failed", error))
            await self.finish_writing()
            return False
        streams = [
            name
            for name in dir(type(self.part))
            if not name.startswith("_") and inspect.isasyncgenfunction(getattr(type(self.part), name))
        ]
        self.send(frames.READY, 0, streams)
        calm_garbage_collection()
        return True

    async def answer(self, reader: asyncio.StreamReader) -> None:
        while True:
            kind, call_id, payload = await frames.read_frame(reader)
            if kind == frames.CLOSE:
                await self.close(call_id)
                return
            if kind == frames.STOP_STREAM:
                if task := self.tasks.get(call_id):
                    task.cancel()
                continue
            run = self.run_stream if kind == frames.STREAM else self.run_call
            task = asyncio.create_task(run(call_id, payload))
            self.tasks[call_id] = task
            task.add_done_callback(lambda _, call_id=call_id: self.tasks.pop(call_id, None))

    async def run_call(self, call_id: int, payload: bytes) -> None:
        method = "call"
        try:
            method, args, kwargs = frames.unpack(payload)
            result = getattr(self.part, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            self.send(frames.RESULT, call_id, result)
        except (Exception, asyncio.CancelledError) as error:
            self.send(frames.ERROR, call_id, frames.pack_error(f"{self.name}.{method}", error))
        await self.drain()

    async def run_stream(self, call_id: int, payload: bytes) -> None:
        method, items = "stream", None
        try:
            method, args, kwargs = frames.unpack(payload)
            items = getattr(self.part, method)(*args, **kwargs)
            async for item in items:
                self.send(frames.ITEM, call_id, item)
                await self.drain()
            self.send(frames.RESULT, call_id, None)
        except asyncio.CancelledError:  # the caller stopped listening
            self.send(frames.RESULT, call_id, None)
        except Exception as error:
            self.send(frames.ERROR, call_id, frames.pack_error(f"{self.name}.{method}", error))
        finally:
            if items is not None:
                await items.aclose()

    async def close(self, call_id: int) -> None:
        failure = None
        try:
            closing = getattr(self.part, "close", None)
            result = closing() if closing is not None else None
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            failure = frames.pack_error(f"{self.name}.close", error)
        self.send(frames.CLOSED, call_id, failure)
        await self.finish_writing()

    # Every frame carries the events recorded since the last one.
    def send(self, kind: int, call_id: int, value: Any) -> None:
        count = len(self.events)
        payload = frames.pack((value, self.events[:count]))  # raises for a result that cannot travel
        del self.events[:count]
        self.writer.write(kind, call_id, payload)

    async def flush_events_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVENTS_S)
            if self.events:
                self.send(frames.EVENTS, 0, None)
                await self.drain()

    async def drain(self) -> None:
        """Wait for a slow reader. One that has hung up is `answer`'s business: calls that were still running have nobody to tell."""
        with contextlib.suppress(ConnectionError):
            await self.writer.stream.drain()

    async def finish_writing(self) -> None:
        self.writer.flush()
        self.writer.stream.close()
        await self.writer.stream.wait_closed()
