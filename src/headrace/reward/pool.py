"""Turns score requests into calls of worker processes that may hang or die, and always hands a score back for each.

    score() -> one queue -> the next free worker, one call at a time -> scores
                 ^                     |
                 |  batch: one by one  |  past timeout_s: the worker is killed and replaced
                 +---------------------+

Per-sample requests that wait together share a call (a few for quick functions, one for slow ones). When such a call
times out, or its worker dies, its requests go back to the front and run alone, so that a bad one fails by itself.
A request alone (or a group) that times out has failed; one whose worker died is tried once more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CallTimeout, HeadraceError, WorkerDied
from headrace.protocols import EventSink, Proxy, Resources, Rewarder, RewardRequest, Runtime
from headrace.reward.combine import failed_score
from headrace.reward.config import RewardConfig
from headrace.reward.inline import InlineRewarder
from headrace.reward.meter import RewardMeter
from headrace.reward.worker import ScoredCall, WorkerFacts, build_worker, score_event
from headrace.types import Metrics, Score

MAX_BATCH = 64
CALL_TARGET_S = 0.1
"""Per-sample requests share a call as long as it is expected to take no longer."""
ASYNC_GRACE_S = 1.0
"""How much longer than timeout_s an async function gets to end by itself before its worker is killed."""
SPAWN_TIMEOUT_S = 120.0
RESPAWN_WAITS_S = (0.0, 0.5, 2.0)
"""A worker that cannot be replaced after so many tries is given up."""


def build_rewarder(
    config: RewardConfig, runtime: Runtime, record: EventSink, base_folder: Path
) -> PooledRewarder | InlineRewarder:
    """The reward plane that the config asks for. Relative `file.py:fn` are looked up in `base_folder`.

    Await `start()` on it: there it raises `ConfigError` for a function that cannot be used.
    """
    if config.workers == 0:
        return InlineRewarder(config, record, base_folder)
    return PooledRewarder(config, runtime, record, base_folder)


@dataclass(slots=True, eq=False)
class _Job:
    """Requests that are scored in one call: one sample, or a whole group."""

    requests: tuple[RewardRequest, ...]
    future: asyncio.Future[list[Score]]
    alone: bool
    """Never shares a call: a group, or a sample whose shared call failed."""
    deaths: int = 0


@dataclass(slots=True, eq=False)
class _Slot:
    """One worker's place; the worker in it may be replaced."""

    name: str
    proxy: Proxy | None = None
    began_s: float | None = None
    """When the call in progress began."""


class PooledRewarder(Rewarder):
    """Scores in worker processes of its own, `config.workers` of them, one call at a time each."""

    def __init__(self, config: RewardConfig, runtime: Runtime, record: EventSink, base_folder: Path) -> None:
        self.unit = config.unit
        self.meter = RewardMeter()
        self._config = config
        self._runtime = runtime
        self._record = record
        self._base_folder = base_folder
        self._queue: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._slots = [_Slot(f"reward-{index}") for index in range(config.workers)]
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._starting: asyncio.Task[None] | None = None
        self._running: dict[str, list[_Job]] = {}
        self._facts = WorkerFacts((), False)
        self._limit_s = config.timeout_s
        self._each_s: float | None = None
        self._broken: str | None = None
        """Why no score can be made any more: closed, or no worker left."""

    # ------------------------------------------------------------------------------------------------ the rewarder

    async def start(self) -> None:
        """Spawn the workers. Idempotent. Raises `ConfigError` for a function that cannot be used."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._starting)

    async def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score for each request, in order; waits for a free worker."""
        await self.start()
        loop = asyncio.get_running_loop()
        if self.unit == "group":
            parts = [tuple(requests)] if requests else []
        else:
            parts = [(request,) for request in requests]
        jobs = [_Job(part, loop.create_future(), alone=self.unit == "group") for part in parts]
        if self._broken:
            for job in jobs:
                self._fail(job, self._broken)
        else:
            self._queue.extend(jobs)
            self._arrived.set()
        answers = await asyncio.gather(*(job.future for job in jobs))
        return [score for scores in answers for score in scores]

    def metrics(self) -> Metrics:
        """What happened since the last call of this."""
        now_s = asyncio.get_running_loop().time()
        running_s = [now_s - slot.began_s for slot in self._slots if slot.began_s is not None]
        return self.meter.window(now_s, self.queued, len(self._slots), running_s)

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return sum(len(job.requests) for job in self._queue if not job.future.done())

    @property
    def in_progress(self) -> int:
        """Requests that a worker is scoring."""
        return sum(len(job.requests) for jobs in self._running.values() for job in jobs)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the workers, None for a place that is empty or in this process."""
        return [slot.proxy.pid if slot.proxy else None for slot in self._slots]

    async def close(self) -> None:
        """End the workers; whatever waits gets a failed score. Idempotent."""
        self._give_up("the reward pool is closed")
        loops, self._loops = list(self._loops.values()), {}
        if self._starting is not None and not self._starting.done():
            loops.append(self._starting)
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        interrupted, self._running = self._running, {}
        for jobs in interrupted.values():
            for job in jobs:
                self._fail(job, "the reward pool is closed")
        for slot in self._slots:
            proxy, slot.proxy = slot.proxy, None
            if proxy is not None:
                # A call in progress can block for ever, so such a worker is not asked.
                await (proxy.kill() if slot.name in interrupted else proxy.close())

    # ------------------------------------------------------------------------------------------------- the workers

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        spawned = await asyncio.gather(*(self._spawn(slot) for slot in self._slots), return_exceptions=True)
        failures = [outcome for outcome in spawned if isinstance(outcome, BaseException)]
        if failures:
            for slot in self._slots:
                await self._discard(slot)
            raise failures[0]
        self.meter.start(loop.time())
        for slot in self._slots:
            self._loops[slot.name] = loop.create_task(self._serve(slot), name=slot.name)

    async def _spawn(self, slot: _Slot) -> None:
        try:
            async with asyncio.timeout(SPAWN_TIMEOUT_S):
                slot.proxy = await self._runtime.spawn(
                    slot.name, build_worker, self._config, str(self._base_folder), resources=Resources(threads=1)
                )
                self._facts = await slot.proxy.facts()
        except TimeoutError:
            raise CallTimeout(f"{slot.name} was not ready after {SPAWN_TIMEOUT_S:g} s") from None
        self._limit_s = self._config.timeout_s + (ASYNC_GRACE_S if self._facts.asynchronous else 0.0)

    async def _discard(self, slot: _Slot) -> None:
        proxy, slot.proxy = slot.proxy, None
        if proxy is not None:
            await proxy.kill()

    async def _replace(self, slot: _Slot) -> bool:
        """A new worker in an empty place. False when none can be had."""
        problem: BaseException | None = None
        for wait_s in RESPAWN_WAITS_S:
            await asyncio.sleep(wait_s)
            try:
                await self._spawn(slot)
            except (HeadraceError, OSError) as error:
                problem = error
                await self._discard(slot)
                continue
            self.meter.count("replacements")
            return True
        if not any(other.proxy is not None or other.name in self._loops for other in self._slots if other is not slot):
            self._give_up(f"no reward worker is left: {type(problem).__name__}: {problem}")
        return False

    async def _serve(self, slot: _Slot) -> None:
        """One worker's loop: wait for work, replace the worker when it is gone, take what waits, call, hand out."""
        try:
            while True:
                if slot.proxy is not None:
                    await self._work_is_there()
                    if not slot.proxy.alive:  # it died while it had nothing to do
                        await self._discard(slot)
                        self.meter.count("deaths")
                if slot.proxy is None and not await self._replace(slot):
                    return
                if jobs := self._next_jobs():
                    self._running[slot.name] = jobs
                    await self._call(slot, jobs)
                    del self._running[slot.name]
        finally:
            self._loops.pop(slot.name, None)

    async def _work_is_there(self) -> None:
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()

    def _next_jobs(self) -> list[_Job]:
        """The oldest job, with per-sample ones behind it that may share its call; those of cancelled callers are left out."""
        while self._queue and self._queue[0].future.done():
            self._queue.popleft()
        if not self._queue:
            return []
        jobs = [self._queue.popleft()]
        limit = 1 if jobs[0].alone else self._batch_limit()
        while self._queue and len(jobs) < limit and not self._queue[0].alone:
            job = self._queue.popleft()
            if not job.future.done():
                jobs.append(job)
        return jobs

    def _batch_limit(self) -> int:
        """How many per-sample requests share a call: an equal part of the queue, and what is expected to be quick.

        Requests to functions that only wait run side by side in the worker, so they all go at once.
        """
        share = -(-(len(self._queue) + 1) // max(1, len(self._loops)))
        if self._facts.asynchronous:
            return min(MAX_BATCH, share)
        if self._each_s is None:
            return 1
        return max(1, min(MAX_BATCH, share, int(CALL_TARGET_S / max(self._each_s, 1e-6))))

    async def _call(self, slot: _Slot, jobs: list[_Job]) -> None:
        """Score the jobs on the slot's worker. Every job is answered or back in the queue afterwards."""
        loop = asyncio.get_running_loop()
        requests = [request for job in jobs for request in job.requests]
        assert slot.proxy is not None
        began_s = loop.time()
        slot.began_s = began_s
        try:
            async with asyncio.timeout(self._limit_s):
                reply: ScoredCall = await slot.proxy.score(requests)
        except TimeoutError:
            self.meter.count("timeouts")
            self._record(score_event(slot.name, requests, began_s, loop.time()))  # the killed worker's own is lost
            await self._discard(slot)
            problem = f"no answer after {self._limit_s:g} s; the worker was killed"
            self._retry(jobs, problem, died=False)
        except WorkerDied:
            self.meter.count("deaths")
            await self._discard(slot)
            self._record(score_event(slot.name, requests, began_s, loop.time()))
            self._retry(jobs, "the worker died twice while scoring it", died=True)
        except Exception as error:
            # A part's failure of any other kind (an answer that cannot be sent, say) must not stop the loop.
            self._retry(jobs, f"{type(error).__name__}: {error}", died=False)
        else:
            self._hand_out(jobs, reply, len(requests), loop.time() - began_s)
        finally:
            slot.began_s = None
            self.meter.called(loop.time() - began_s, len(requests))

    def _hand_out(self, jobs: list[_Job], reply: ScoredCall, count: int, seconds: float) -> None:
        each_s = seconds / count
        self._each_s = each_s if self._each_s is None else 0.5 * (self._each_s + each_s)
        self.meter.count("timeouts", reply.timeouts)
        start = 0
        for job in jobs:
            self._answer(job, reply.scores[start : start + len(job.requests)])
            start += len(job.requests)

    def _retry(self, jobs: list[_Job], problem: str, *, died: bool) -> None:
        """After a failed call: what shared it runs alone, in front; what was alone has failed (a death: the second time)."""
        again = []
        for job in jobs:
            shared = len(jobs) > 1
            job.deaths += died and not shared
            job.alone = True
            if shared or (died and job.deaths < 2):
                again.append(job)
            else:
                self._fail(job, problem)
        if self._broken:
            for job in again:
                self._fail(job, self._broken)
            return
        self._queue.extendleft(reversed(again))
        self._arrived.set()

    # ------------------------------------------------------------------------------------------------- the answers

    def _answer(self, job: _Job, scores: list[Score]) -> None:
        if not job.future.done():
            self.meter.finished(scores)
            job.future.set_result(scores)

    def _fail(self, job: _Job, problem: str) -> None:
        parts = dict.fromkeys(self._facts.names)
        self._answer(job, [failed_score(problem, self._config.on_error, parts) for _ in job.requests])

    def _give_up(self, problem: str) -> None:
        self._broken = self._broken or problem
        while self._queue:
            self._fail(self._queue.popleft(), self._broken)
