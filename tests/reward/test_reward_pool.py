"""The pool's own decisions, on a virtual clock with a scripted runtime: no process, no waiting."""

import asyncio
from pathlib import Path

import pytest

from headrace.errors import PartFailed, WorkerDied
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.protocols import RewardRequest
from headrace.reward.config import RewardConfig, RewardFunctionConfig
from headrace.reward.meter import RewardMeter
from headrace.reward.pool import CALL_TARGET_S, MAX_BATCH, RESPAWN_WAITS_S, PooledRewarder
from headrace.reward.worker import ScoredCall, WorkerFacts
from headrace.types import Score, Task


def request(text):
    return RewardRequest(task=Task(task_id=text, source="test", payload={}), prompt="p", completion=text)


class ScriptedRuntime:
    """Workers that take `seconds` a request; "hang" never ends, "die" ends the worker."""

    def __init__(self, seconds=0.01, asynchronous=False, spawns=10**9):
        self.seconds, self.asynchronous, self.spawns_left = seconds, asynchronous, spawns
        self.calls, self.killed, self.proxies = [], 0, []

    async def spawn(self, name, factory, *args, resources):
        if self.spawns_left == 0:
            raise PartFailed("no memory")
        self.spawns_left -= 1
        self.proxies.append(ScriptedProxy(name, self))
        return self.proxies[-1]


class ScriptedProxy:
    pid = None

    def __init__(self, name, runtime):
        self.name, self.runtime, self.alive = name, runtime, True

    async def facts(self):
        return WorkerFacts(("f",), self.runtime.asynchronous)

    async def score(self, requests):
        texts = [r.completion for r in requests]
        self.runtime.calls.append(texts)
        if not self.alive:
            raise WorkerDied("gone already")
        await asyncio.sleep(self.runtime.seconds * (1 if self.runtime.asynchronous else len(texts)))
        if "hang" in texts:
            await asyncio.sleep(1e9)
        if "die" in texts:
            self.alive = False
            raise WorkerDied("gone")
        if "unsendable" in texts:
            raise PartFailed("cannot be sent")
        return ScoredCall([Score(reward=float(text)) for text in texts])

    async def kill(self):
        self.alive = False
        self.runtime.killed += 1

    async def close(self):
        self.alive = False


def pooled(runtime, *, workers=1, timeout_s=30.0, unit="sample"):
    function = RewardFunctionConfig(use="f.py:f", unit=unit)
    config = RewardConfig(functions=(function,), workers=workers, timeout_s=timeout_s)
    return PooledRewarder(config, runtime, lambda event: None, Path("."))


def run(runtime, texts, **settings):
    """The rewards, and the pool after it."""

    async def main():
        rewarder = pooled(runtime, **settings)
        scores = await rewarder.score([request(text) for text in texts])
        await rewarder.close()
        return [score.reward for score in scores], rewarder

    return run_simulated(main())


def numbers(count):
    return [str(n) for n in range(count)]


def test_quick_requests_share_calls_within_the_target_and_the_bound():
    runtime = ScriptedRuntime(seconds=0.004)
    rewards, _ = run(runtime, numbers(200))
    assert rewards == [float(n) for n in range(200)]
    sizes = [len(call) for call in runtime.calls]
    assert sizes[0] == 1 and max(sizes) == int(CALL_TARGET_S / 0.004)
    runtime = ScriptedRuntime(seconds=0.0)
    run(runtime, numbers(500))
    assert max(len(call) for call in runtime.calls) == MAX_BATCH


def test_slow_requests_go_one_by_one_and_waiting_ones_all_at_once():
    slow, waiting = ScriptedRuntime(seconds=1.0), ScriptedRuntime(seconds=1.0, asynchronous=True)
    run(slow, numbers(6))
    run(waiting, numbers(40))
    assert [len(call) for call in slow.calls] == [1] * 6
    assert [len(call) for call in waiting.calls] == [40]


def test_workers_share_the_queue():
    runtime = ScriptedRuntime(seconds=1.0, asynchronous=True)
    run(runtime, numbers(40), workers=4)
    assert len(runtime.calls[0]) == 10
    assert len(runtime.calls) >= 4


@pytest.mark.parametrize("bad", ["hang", "die", "unsendable"])
def test_a_bad_request_in_a_shared_call_fails_alone_and_order_is_kept(bad):
    runtime = ScriptedRuntime(seconds=0.001)
    texts = [*numbers(20), bad, *numbers(20)]
    rewards, rewarder = run(runtime, texts)
    assert rewards == [None if text == bad else float(text) for text in texts]
    assert rewarder.meter.totals["errors"] == 1
    assert any(bad in call and len(call) > 1 for call in runtime.calls), "it never shared a call"
    alone = sum(call == [bad] for call in runtime.calls)
    assert alone == (2 if bad == "die" else 1)
    gone = {"hang": 2, "die": 3, "unsendable": 0}[bad]
    assert (rewarder.meter.totals["replacements"], runtime.killed) == (gone, gone)


def test_retries_come_before_what_came_later():
    runtime = ScriptedRuntime(seconds=0.02)  # five share a call
    run(runtime, ["0", "1", "2", "3", "hang", "5", *numbers(9)], timeout_s=1.0)
    failed = next(index for index, call in enumerate(runtime.calls) if "hang" in call)
    shared = runtime.calls[failed]
    assert len(shared) > 1
    assert runtime.calls[failed + 1 : failed + 1 + len(shared)] == [[text] for text in shared]


def test_a_worker_that_died_idle_is_replaced_before_it_is_asked():
    async def main():
        rewarder = pooled(runtime)
        await rewarder.score([request("1")])
        runtime.proxies[0].alive = False
        [score] = await rewarder.score([request("2")])
        await rewarder.close()
        return score.reward, rewarder.meter.totals

    runtime = ScriptedRuntime()
    reward, totals = run_simulated(main())
    assert reward == 2.0
    assert (totals["deaths"], totals["replacements"]) == (1, 1)
    assert runtime.calls == [["1"], ["2"]]


def test_what_a_cancelled_caller_left_in_the_queue_is_not_scored():
    async def main():
        rewarder = pooled(runtime)
        first = asyncio.create_task(rewarder.score([request("1")]))
        await asyncio.sleep(0.5)
        given_up = asyncio.create_task(rewarder.score([request("2"), request("3")]))
        await asyncio.sleep(0.1)
        queued = rewarder.queued
        given_up.cancel()
        last = asyncio.create_task(rewarder.score([request("4")]))
        rewards = [score.reward for score in [*await first, *await last]]
        await rewarder.close()
        return queued, rewards

    runtime = ScriptedRuntime(seconds=1.0)
    assert run_simulated(main()) == (2, [1.0, 4.0])
    assert runtime.calls == [["1"], ["4"]]


def test_groups_never_share_a_call_and_are_not_split():
    async def main():
        rewarder = pooled(runtime, unit="group", timeout_s=5.0)
        answers = await asyncio.gather(
            rewarder.score([request("1"), request("2")]),
            rewarder.score([request("3"), request("hang")]),
            rewarder.score([request("4"), request("5")]),
        )
        await rewarder.close()
        return [[score.reward for score in scores] for scores in answers]

    runtime = ScriptedRuntime(seconds=0.0001)
    assert run_simulated(main()) == [[1.0, 2.0], [None, None], [4.0, 5.0]]
    assert runtime.calls == [["1", "2"], ["3", "hang"], ["4", "5"]]


def test_one_worker_scores_on_while_the_other_hangs():
    async def main():
        rewarder = pooled(ScriptedRuntime(seconds=0.1), workers=2, timeout_s=100.0)
        loop = asyncio.get_running_loop()
        hanging = asyncio.create_task(rewarder.score([request("hang")]))
        await asyncio.sleep(0.05)
        good = await rewarder.score([request("1"), request("2")])
        good_at_s = loop.time()
        [bad] = await hanging
        bad_at_s = loop.time()
        await rewarder.close()
        return [score.reward for score in good], bad.reward, good_at_s, bad_at_s

    good, bad, good_at_s, bad_at_s = run_simulated(main())
    assert (good, bad) == ([1.0, 2.0], None)
    assert good_at_s < 1.0 and bad_at_s == pytest.approx(100.0)


def test_a_worker_that_cannot_be_replaced_leaves_the_work_to_the_others():
    runtime = ScriptedRuntime(seconds=0.01, spawns=2)
    rewards, rewarder = run(runtime, ["hang", *numbers(5)], workers=2, timeout_s=1.0)
    assert rewards == [None, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert rewarder.meter.totals["replacements"] == 0


def test_without_workers_everything_waiting_fails_after_the_last_try():
    runtime = ScriptedRuntime(seconds=0.01, spawns=1)
    rewards, rewarder = run(runtime, ["hang", *numbers(5)], timeout_s=1.0)
    assert rewards == [None] * 6
    assert rewarder.meter.totals["errors"] == 6
    assert sum(RESPAWN_WAITS_S) > 0


def test_metrics_of_a_pool_at_work():
    async def main():
        rewarder = pooled(ScriptedRuntime(seconds=2.0), workers=2)
        await rewarder.start()
        scoring = asyncio.create_task(rewarder.score([request(text) for text in numbers(5)]))
        await asyncio.sleep(3.0)
        first = rewarder.metrics()
        await scoring
        second = rewarder.metrics()
        await rewarder.close()
        return first, second

    first, second = run_simulated(main())
    # two workers: 0-2 s, 2-4 s two requests each, the fifth at 4-6 s with one worker idle
    assert first["reward/scores_per_s"].mean == pytest.approx(2 / 3)
    assert first["reward/queue_depth"].mean == 1
    assert first["reward/idle_share"].mean == pytest.approx(0.0)
    assert first["reward/score_s"].mean == pytest.approx(2.0)
    assert second["reward/scores_per_s"].mean == pytest.approx(1.0)
    assert second["reward/idle_share"].mean == pytest.approx(1 / 3)
    assert second["reward/score_s"].weight == 3


def test_a_call_longer_than_several_windows_is_counted_once():
    meter = RewardMeter()
    meter.start(0.0)
    shares = [meter.window(float(now), 0, 1, [float(now) - 0.5])["reward/idle_share"].mean for now in (1, 2, 3)]
    assert shares == pytest.approx([0.5, 0.0, 0.0])
    meter.called(3.0, 1)  # it ended at 3.5
    assert meter.window(4.0, 0, 1, [])["reward/idle_share"].mean == pytest.approx(0.5)


def test_a_window_of_no_length_is_finite():
    meter = RewardMeter()
    meter.start(1.0)
    metrics = meter.window(1.0, 0, 1, [])
    assert metrics["reward/scores_per_s"].mean == 0.0 and metrics["reward/idle_share"].mean == 0.0
