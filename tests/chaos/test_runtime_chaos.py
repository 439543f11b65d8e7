"""Bad days of the runtimes, with real processes: SIGKILL, SIGSTOP, full pipes, a controller that is killed itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from headrace.errors import PartFailed, WorkerDied
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.protocols import WorkerContext


class Part:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    async def echo(self, value):
        return value

    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def block(self) -> None:
        time.sleep(3600)  # a long forward pass inside an async method

    def leave(self, code: int) -> None:
        os._exit(code)

    def start_child(self) -> int:
        """A grandchild that holds this process's socket open."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

    async def close(self) -> None:
        await asyncio.sleep(0)


class Stubborn(Part):
    async def close(self) -> None:
        await asyncio.sleep(3600)


def build_and_die(context: WorkerContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
async def runtime():
    opened = ProcessRuntime(lambda event: None, close_timeout_s=2.0)
    yield opened
    await opened.close()


async def test_killed_in_the_middle_of_calls(runtime):
    part = await runtime.spawn("engine-0", Part)
    calls = [asyncio.create_task(part.nap(60)) for _ in range(10)]
    await part.echo(1)
    os.kill(part.pid, signal.SIGKILL)
    started = time.monotonic()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - started < 2.0
    assert all(isinstance(result, WorkerDied) and "SIGKILL" in str(result) for result in results), results
    assert not part.alive
    assert not psutil.pid_exists(part.pid), "no zombie is kept"


async def test_a_worker_that_exits_or_dies_while_it_is_built(runtime):
    part = await runtime.spawn("engine-0", Part)
    with pytest.raises(WorkerDied, match="exited with code 7"):
        await part.leave(7)
    with pytest.raises(WorkerDied, match=r"engine-1.*SIGKILL"):
        await runtime.spawn("engine-1", build_and_die)


async def test_death_is_seen_though_a_grandchild_keeps_the_socket_open(runtime):
    part = await runtime.spawn("engine-0", Part)
    grandchild = await part.start_child()
    try:
        call = asyncio.create_task(part.nap(60))
        await part.echo(1)
        os.kill(part.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(call, 3)
    finally:
        os.kill(grandchild, signal.SIGKILL)


async def test_a_stopped_worker_blocks_its_callers_only_and_until_their_deadline(runtime):
    stopped, other = await asyncio.gather(runtime.spawn("engine-0", Part), runtime.spawn("engine-1", Part))
    os.kill(stopped.pid, signal.SIGSTOP)
    large = b"x" * 300_000  # a few of these fill the pipe
    calls = [asyncio.create_task(asyncio.wait_for(stopped.echo(large), 0.5)) for _ in range(50)]
    beats, longest = 0, 0.0
    while not all(call.done() for call in calls):
        started = time.monotonic()
        assert await other.echo("on time") == "on time"
        longest, beats = max(longest, time.monotonic() - started), beats + 1
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, TimeoutError) for result in results)
    assert beats > 10 and longest < 0.4, (beats, longest)
    assert stopped._writer.stream.transport.get_write_buffer_size() < 4 * len(large), (
        "who waits for room has sent nothing"
    )
    os.kill(stopped.pid, signal.SIGCONT)
    assert await asyncio.wait_for(stopped.echo("again"), 10) == "again"
    assert 1 <= stopped.ignored_replies <= 5
    os.kill(stopped.pid, signal.SIGSTOP)
    await asyncio.wait_for(stopped.kill(), 5)


async def test_a_blocked_worker_can_be_killed_and_closed(runtime):
    blocked, stubborn = await asyncio.gather(runtime.spawn("trainer", Part), runtime.spawn("engine-0", Stubborn))
    call = asyncio.create_task(blocked.block())
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await blocked.kill()
    with pytest.raises(WorkerDied):
        await call
    assert time.monotonic() - started < 2.0
    await stubborn.close()
    assert 1.9 < time.monotonic() - started < 6.0, "a part that does not close is killed after its time"
    assert not psutil.pid_exists(stubborn.pid)


async def test_a_spawn_that_is_given_up_leaves_no_process(runtime):
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(runtime.spawn("engine-0", Part), 0.02)
    assert {child.pid for child in psutil.Process().children()} <= before


async def test_two_hundred_calls_some_given_up_over_workers_that_are_killed(runtime):
    chance = random.Random(0)
    parts = await asyncio.gather(*[runtime.spawn(f"engine-{i}", Part) for i in range(4)])
    calls = [asyncio.create_task(parts[i % 4].nap(chance.uniform(0, 1.0))) for i in range(200)]
    owner = {id(call): i % 4 for i, call in enumerate(calls)}

    async def give_up() -> None:
        for call in chance.sample(calls, 50):
            await asyncio.sleep(chance.uniform(0, 0.02))
            call.cancel()

    async def murder() -> None:
        for victim in (1, 3):
            await asyncio.sleep(0.2)
            os.kill(parts[victim].pid, signal.SIGKILL)

    await asyncio.wait_for(asyncio.gather(give_up(), murder(), asyncio.wait(calls)), 30)
    ends = {"done": 0, "cancelled": 0, "died": 0}
    for call in calls:
        if call.cancelled():
            ends["cancelled"] += 1
        elif call.exception() is None:
            ends["done"] += 1
        else:
            assert isinstance(call.exception(), WorkerDied) and owner[id(call)] in (1, 3)
            ends["died"] += 1
    assert sum(ends.values()) == 200 and min(ends.values()) > 5, ends
    for survivor in (parts[0], parts[2]):
        assert await survivor.echo("still here") == "still here" and not survivor._pending
    assert not parts[1]._pending and not parts[3]._pending


async def test_a_reply_that_the_controller_cannot_rebuild_fails_one_call(runtime):
    part = await runtime.spawn("engine-0", Part)
    with pytest.raises(PartFailed, match="unreadable reply"):
        await part.echo(OnlyThere())
    assert await part.echo(2) == 2


class OnlyThere:
    """Travels to a worker and not back."""

    def __reduce__(self):
        return (_only_in, (os.getpid(),))


def _only_in(pid: int) -> OnlyThere:
    if os.getpid() == pid:
        raise RuntimeError("cannot be rebuilt here")
    copy = OnlyThere.__new__(OnlyThere)
    copy.__class__ = _Back
    _Back.pid = pid
    return copy


class _Back(OnlyThere):
    pid = 0

    def __reduce__(self):
        return (_only_in, (self.pid,))


CONTROLLER = """
    import asyncio, os, time
    from headrace.orchestrator.runtimes.processes import ProcessRuntime

    class Part:
        def __init__(self, context, channel=None):
            self.channel = channel
        async def block(self):
            time.sleep(3600)
        def publish(self):
            import torch
            return self.channel.publish([("w", torch.ones(1_000_000))], 1)
        async def idle(self):
            return os.getpid()

    async def main():
        from headrace.exchange.channels import open_channel
        runtime = ProcessRuntime(lambda event: None)
        channel = open_channel("shared_memory")
        parts = await asyncio.gather(
            runtime.spawn("trainer", Part, channel), runtime.spawn("engine-0", Part), runtime.spawn("engine-1", Part))
        await parts[0].publish()
        blocked = asyncio.create_task(parts[1].block())
        await asyncio.sleep(0.2)
        print(*[part.pid for part in parts], flush=True)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:  # the first ctrl-c
            await parts[2].idle()
            print("workers outlive ctrl-c", flush=True)
        await asyncio.sleep(3600)

    if __name__ == "__main__":
        asyncio.run(main())
"""


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> list[int]:
    deadline = time.monotonic() + seconds
    left = pids
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    return left


def test_ctrl_c_spares_the_workers_and_a_killed_controller_leaves_no_process_and_no_shared_memory(tmp_path):
    before = set(os.listdir("/dev/shm"))
    script = tmp_path / "controller.py"
    script.write_text(textwrap.dedent(CONTROLLER))
    controller = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 3
        os.killpg(controller.pid, signal.SIGINT)
        assert controller.stdout.readline() == "workers outlive ctrl-c\n"
        assert all(psutil.Process(pid).status() != "zombie" for pid in pids)
        os.kill(pids[2], signal.SIGSTOP)  # one has published, one is blocked, one is stopped
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
    assert wait_until_gone(pids) == []
    assert set(os.listdir("/dev/shm")) <= before
