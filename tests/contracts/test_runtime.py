"""The Runtime contract, over every runtime, with small parts that travel to their worker by name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import numpy as np
import pytest

from headrace.errors import ConfigError, ConservationError, HeadraceError, PartFailed, RolloutDropped, WorkerDied
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.protocols import Resources, WorkerContext
from headrace.types import Event


class Part:
    """A little of everything that a real part does."""

    def __init__(self, context: WorkerContext, offset: int) -> None:
        self.context, self.offset = context, offset
        self.gate = asyncio.Event()
        self.finished = 0
        self.closed_streams = 0

    def add(self, value: int, *, twice: bool = False) -> int:
        return (value + self.offset) * (2 if twice else 1)

    async def echo(self, value):
        await asyncio.sleep(0)
        return value

    async def wait_for_gate(self, name: str) -> str:
        await self.gate.wait()
        self.finished += 1
        return name

    async def open_gate(self) -> None:
        self.gate.set()

    async def count_finished(self) -> int:
        return self.finished

    def fail(self, kind: str):
        if kind == "config":
            raise ConfigError("some.key", "is wrong")
        if kind == "ids":
            raise ConservationError("lost", ["a", "b"])
        if kind == "dropped":
            raise RolloutDropped("end", "detail")
        if kind == "cancelled":
            raise asyncio.CancelledError
        raise ValueError(f"a {kind} mistake")

    async def count(self, n: int):
        try:
            for i in range(n):
                yield i
                await asyncio.sleep(0)
            if n == 3:
                raise ValueError("three")
        finally:
            self.closed_streams += 1

    async def count_for_ever(self):
        yield 0
        await asyncio.Event().wait()

    async def streams_closed(self) -> int:
        return self.closed_streams

    def record(self, kind: str) -> None:
        self.context.record(Event(time.monotonic_ns(), self.context.name, kind))

    async def close(self) -> None:
        self.context.record(Event(time.monotonic_ns(), self.context.name, "closed"))


class BadAtClosing:
    def __init__(self, context: WorkerContext) -> None: ...

    def close(self) -> None:
        raise ValueError("cannot close")


def build(context: WorkerContext, offset: int = 0) -> Part:
    return Part(context, offset)


async def build_slowly(context: WorkerContext) -> Part:
    await asyncio.sleep(0.01)
    return Part(context, 100)


def build_wrongly(context: WorkerContext, kind: str) -> Part:
    if kind == "ours":
        raise ConfigError("model.path", "no such folder")
    raise ZeroDivisionError("the model is empty")


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all tests of it: to start one takes seconds, and gigabytes while it lives."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(params=["local", "processes", pytest.param("ray", marks=pytest.mark.slow)])
async def runtime(request):
    events: list[Event] = []
    if request.param == "ray":
        request.getfixturevalue("cluster")
        from headrace.orchestrator.runtimes.ray import RayRuntime

        opened = RayRuntime(events.append)
    else:
        opened = {"local": LocalRuntime, "processes": ProcessRuntime}[request.param](events.append)
    opened.events = events
    yield opened
    await opened.close()


async def test_methods_sync_and_async_are_awaited(runtime):
    part = await runtime.spawn("part-0", build, 5)
    assert part.name == "part-0" and part.alive
    assert await part.add(1) == 6 and await part.add(1, twice=True) == 12
    array = np.arange(300_000, dtype=np.float32)
    np.testing.assert_array_equal(await part.echo(array), array)
    slow = await runtime.spawn("slow", build_slowly)
    assert await slow.add(1) == 101


async def test_async_calls_interleave(runtime):
    part = await runtime.spawn("part", build)
    waiting = [asyncio.create_task(part.wait_for_gate(f"w{i}")) for i in range(20)]
    assert await part.echo("meanwhile") == "meanwhile"
    await part.open_gate()
    assert await asyncio.gather(*waiting) == [f"w{i}" for i in range(20)]


async def test_our_errors_arrive_as_themselves_and_others_with_their_words(runtime):
    part = await runtime.spawn("part", build)
    with pytest.raises(ConfigError, match=r"^some\.key: is wrong$") as config:
        await part.fail("config")
    assert config.value.path == "some.key"
    with pytest.raises(ConservationError) as conservation:
        await part.fail("ids")
    assert conservation.value.ids == ["a", "b"]
    with pytest.raises(RolloutDropped) as dropped:
        await part.fail("dropped")
    assert dropped.value.reason == "end" and dropped.value.detail == "detail"
    with pytest.raises(PartFailed, match=r"part\.fail: ValueError: a foolish mistake"):
        await part.fail("foolish")
    with pytest.raises(PartFailed, match="no_such_method"):
        await part.no_such_method()
    with pytest.raises(PartFailed, match=r"part\.fail: .*[Cc]ancelled"):
        await part.fail("cancelled")
    assert await part.add(1) == 1, "a failed call does no harm to the part"


async def test_a_factory_that_raises(runtime):
    with pytest.raises(ConfigError, match=r"model\.path: no such folder"):
        await runtime.spawn("part", build_wrongly, "ours")
    with pytest.raises(PartFailed, match="ZeroDivisionError: the model is empty"):
        await runtime.spawn("part", build_wrongly, "theirs")


async def test_a_stream_yields_ends_fails_and_is_left(runtime):
    part = await runtime.spawn("part", build)
    assert [item async for item in part.count(5)] == [0, 1, 2, 3, 4]
    seen = []
    with pytest.raises(PartFailed, match="three"):
        async for item in part.count(3):
            seen.append(item)
    assert seen == [0, 1, 2]
    stream = part.count(1_000_000)
    assert await anext(stream) == 0
    await stream.aclose()
    async with asyncio.timeout(5):
        while await part.streams_closed() < 3:
            await asyncio.sleep(0.01)


async def test_kill_fails_pending_and_later_calls_at_once(runtime):
    part = await runtime.spawn("part", build)
    waiting = [asyncio.create_task(part.wait_for_gate(str(i))) for i in range(3)]
    stream = part.count_for_ever()
    assert await anext(stream) == 0
    waiting.append(asyncio.create_task(anext(stream)))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await part.kill()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - started < 1.0
    assert [type(result) for result in results] == [WorkerDied] * 4, results
    assert not part.alive
    with pytest.raises(WorkerDied, match="part"):
        await part.add(1)
    await part.kill()
    await part.close()


async def test_a_call_goes_on_when_its_caller_gives_up_and_its_reply_is_counted(runtime):
    part = await runtime.spawn("part", build)
    call = asyncio.create_task(part.wait_for_gate("left"))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await part.open_gate()
    async with asyncio.timeout(5):
        while await part.count_finished() < 1 or not part.ignored_replies:
            await asyncio.sleep(0.01)
    assert part.ignored_replies == 1


async def test_events_reach_the_record(runtime):
    part = await runtime.spawn("part-7", build)
    await part.record("one")
    assert [(event.source, event.kind) for event in runtime.events] == [("part-7", "one")]
    await part.close()
    assert [event.kind for event in runtime.events] == ["one", "closed"]


async def test_close_is_idempotent_and_goes_from_the_last_to_the_first(runtime):
    for name in ("first", "second", "third"):
        await runtime.spawn(name, build)
    await runtime.close()
    await runtime.close()
    assert [event.source for event in runtime.events] == ["third", "second", "first"]


async def test_a_part_that_fails_to_close_does_not_keep_others_from_closing(runtime):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    await runtime.spawn("first", build)
    await runtime.spawn("bad", BadAtClosing)
    await runtime.close()
    assert [event.source for event in runtime.events] == ["first"]
    assert [context["message"] for context in told] == ["closing bad failed"]
    assert "cannot close" in str(told[0]["exception"])


async def test_names_with_an_underscore_are_not_methods(runtime):
    part = await runtime.spawn("part", build)
    assert not hasattr(part, "_private") and not hasattr(part, "__deepcopy__")


# ---------------------------------------------------------------------------------------------------- local alone


class Sleeper:
    def __init__(self, context: WorkerContext, late: float) -> None:
        self.context, self.late = context, late
        self.background = asyncio.get_running_loop().create_task(self.tick())

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(10)
            self.context.record(Event(int(asyncio.get_running_loop().time()), self.context.name, "tick"))

    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        self.background.cancel()
        await asyncio.sleep(self.late)


def test_the_local_runtime_lives_on_a_virtual_clock_and_repeats():
    async def scene() -> tuple[list, list[Event]]:
        events: list[Event] = []
        runtime = LocalRuntime(events.append)
        part, doomed = await runtime.spawn("a-0", Sleeper, 5.0), await runtime.spawn("b-0", Sleeper, 5.0)
        calls = [asyncio.create_task(target.sleep(100 * i)) for i in range(1, 5) for target in (part, doomed)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(part.sleep(10_000), 50)
        await asyncio.sleep(165)
        await doomed.kill()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        await runtime.close()
        return [type(end) if isinstance(end, Exception) else end for end in ends], events

    started = time.monotonic()
    ends, events = run_simulated(scene())
    assert time.monotonic() - started < 5
    assert ends == [100, 100, 200, 200, 300, WorkerDied, 400, WorkerDied]
    last = {source: max(event.time_ns for event in events if event.source == source) for source in ("a-0", "b-0")}
    assert last == {"a-0": 400, "b-0": 210}, "a killed part's own tasks end too, and it is not heard any more"
    assert run_simulated(scene()) == (ends, events)


# ------------------------------------------------------------------------------------------------ processes alone


class Machine:
    """Says what its process is like."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def environment(self) -> dict:
        torch = sys.modules.get("torch")
        return {
            "pid": os.getpid(),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "mkl": os.environ.get("MKL_NUM_THREADS"),
            "torch": torch.get_num_threads() if torch else None,
            "modules": sorted({name.split(".")[0] for name in sys.modules}),
        }

    def unpicklable(self):
        return lambda: None

    def say(self) -> None:
        print("words from a worker", flush=True)

    async def record_soon(self) -> None:
        asyncio.get_running_loop().call_later(0.05, lambda: self.context.record(Event(1, self.context.name, "unasked")))

    def own_error(self):
        raise UserOwn("text", 3)


class UserOwn(HeadraceError):
    def __init__(self, text: str, number: int) -> None:
        super().__init__(f"{text} {number}")
        self.number = number


def build_machine(context: WorkerContext) -> Machine:
    return Machine(context)


def build_with_torch(context: WorkerContext) -> Machine:
    import torch

    context.record(Event(torch.get_num_threads(), context.name, "threads in the factory"))
    return Machine(context)


@pytest.fixture
async def processes():
    events: list[Event] = []
    opened = ProcessRuntime(events.append)
    opened.events = events
    yield opened
    await opened.close()


async def test_a_worker_is_a_process_with_its_own_thread_budget(processes):
    before = dict(os.environ)
    part = await processes.spawn("m", build_machine, resources=Resources(threads=3))
    found = await part.environment()
    assert found["pid"] == part.pid != os.getpid()
    assert found["omp"] == found["mkl"] == "3"
    assert "torch" not in found["modules"], "a worker imports what its factory needs and no more"
    assert dict(os.environ) == before


async def test_a_worker_outlives_the_signals_that_its_controller_handles(processes):
    part = await processes.spawn("m", build_machine)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(part.pid, number)
        assert (await part.environment())["pid"] == part.pid


async def test_threads_hold_from_the_first_line_of_the_factory(processes):
    part = await processes.spawn("m", build_with_torch, resources=Resources(threads=1))
    assert [event.time_ns for event in processes.events] == [1]
    assert (await part.environment())["torch"] == 1


async def test_a_result_that_cannot_travel_fails_its_call_alone(processes):
    part = await processes.spawn("m", build_machine)
    with pytest.raises(PartFailed, match="unpicklable"):
        await part.unpicklable()
    with pytest.raises(UserOwn, match="text 3") as caught:
        await part.own_error()
    assert caught.value.number == 3


async def test_events_that_nobody_asks_for_are_flushed(processes):
    part = await processes.spawn("m", build_machine)
    await part.record_soon()
    async with asyncio.timeout(3):
        while not processes.events:
            await asyncio.sleep(0.02)
    assert processes.events[0].kind == "unasked"


async def test_output_passes_through(processes, capfd):
    part = await processes.spawn("m", build_machine)
    await part.say()
    assert "words from a worker" in capfd.readouterr().out
