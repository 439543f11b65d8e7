"""Turns score requests into calls of the functions in this process, those of one turn of the event loop together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from headrace.protocols import EventSink, Rewarder, RewardRequest, WorkerContext
from headrace.reward.config import RewardConfig
from headrace.reward.meter import RewardMeter
from headrace.reward.worker import RewardWorker
from headrace.types import Metrics, Score


class InlineRewarder(Rewarder):
    """Scores in this process (`workers = 0`): nothing can end a function that blocks.

    Per-sample requests that come in the same turn of the loop share a call, but for functions that wait.
    """

    def __init__(self, config: RewardConfig, record: EventSink, base_folder: Path) -> None:
        self.unit = config.unit
        self.meter = RewardMeter()
        self._config = config
        self._record = record
        self._base_folder = base_folder
        self._worker: RewardWorker | None = None
        self._waiting: list[tuple[Sequence[RewardRequest], asyncio.Future[list[Score]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()  # the loop holds tasks weakly
        self._began_s: dict[int, float] = {}
        self._calls = 0

    async def start(self) -> None:
        """Load the functions. Idempotent."""
        if self._worker is None:
            self._worker = RewardWorker(
                WorkerContext(name="reward-0", record=self._record), self._config, self._base_folder
            )
            self.meter.start(asyncio.get_running_loop().time())

    async def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        if self._worker is None:
            await self.start()
        assert self._worker is not None
        if not requests:
            return []
        if self.unit != "sample" or self._worker.waits:
            return await self._score(requests)
        loop = asyncio.get_running_loop()
        scores: asyncio.Future[list[Score]] = loop.create_future()
        self._waiting.append((requests, scores))
        if len(self._waiting) == 1:
            task = loop.create_task(self._score_waiting())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await scores

    async def _score_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            scores = await self._score([request for requests, _ in waiting for request in requests])
        except Exception as error:
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        start = 0
        for requests, future in waiting:
            if not future.done():
                future.set_result(scores[start : start + len(requests)])
            start += len(requests)

    async def _score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        assert self._worker is not None
        loop = asyncio.get_running_loop()
        self._calls += 1
        call, began_s = self._calls, loop.time()
        self._began_s[call] = began_s
        try:
            reply = await self._worker.score(requests)
        finally:
            del self._began_s[call]
            self.meter.called(loop.time() - began_s, len(requests))
        self.meter.count("timeouts", reply.timeouts)
        self.meter.finished(reply.scores)
        return reply.scores

    def metrics(self) -> Metrics:
        """What happened since the last call of this."""
        now_s = asyncio.get_running_loop().time()
        return self.meter.window(now_s, 0, 1, [now_s - began_s for began_s in self._began_s.values()])

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()
