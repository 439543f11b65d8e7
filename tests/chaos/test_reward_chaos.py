"""Rewards that misbehave, in real processes: a score for every request, a counter, no hang, the worker replaced."""

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.protocols import RewardRequest
from headrace.reward import pool as pool_module
from headrace.reward.config import RewardConfig, RewardFunctionConfig
from headrace.reward.pool import build_rewarder
from headrace.types import Task

USER_REWARDS = str(Path(__file__).parent.parent / "reward" / "user_rewards.py")
NO_HANG_S = 60.0


def request(completion, **columns):
    task = Task(task_id=completion, source="test", payload={"prompt": "p"} | columns)
    return RewardRequest(task=task, prompt="p", completion=completion)


@asynccontextmanager
async def pool(*, workers=1, timeout_s=1.0, unit="sample", on_error="exclude", name="what_it_says"):
    events = []
    runtime = ProcessRuntime(events.append)
    function = RewardFunctionConfig(use=f"{USER_REWARDS}:{name}", unit=unit)
    config = RewardConfig(functions=(function,), workers=workers, timeout_s=timeout_s, on_error=on_error)
    rewarder = build_rewarder(config, runtime, events.append, Path("."))
    try:
        async with asyncio.timeout(NO_HANG_S):
            await rewarder.start()
            rewarder.events = events
            yield rewarder
    finally:
        await rewarder.close()
        await runtime.close()


async def score(rewarder, *completions):
    return await rewarder.score([request(completion) for completion in completions])


def assert_gone(pid):
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("way", ["hang", "sleep"])
async def test_a_hanging_reward_is_killed_at_its_limit_and_its_worker_replaced(way):
    async with pool() as rewarder:
        await score(rewarder, "warm")
        [before] = rewarder.pids
        started = asyncio.get_running_loop().time()
        scores = await score(rewarder, "a", way, "b")
        took = asyncio.get_running_loop().time() - started
        assert [s.reward for s in scores] == [1.0, None, 1.0]
        assert "no answer after 1 s; the worker was killed" in scores[1].error
        assert scores[1].parts == {"what_it_says": None}
        [after] = rewarder.pids
        assert after != before
        assert_gone(before)
        assert 1.0 <= took < 20
        metrics = rewarder.metrics()
        assert metrics["reward/timeouts"].total >= 1
        assert metrics["reward/errors"].total == 1
        assert metrics["reward/replacements"].total >= 1
        assert metrics["reward/deaths"].total == 0
        killed = [event for event in rewarder.events if event.duration_ns >= 1e9]
        assert killed and all(event.source == "reward-0" and event.kind == "score" for event in killed)


async def test_a_sample_that_hangs_takes_no_neighbour_of_its_call_with_it():
    async with pool() as rewarder:
        for _ in range(8):  # the pool learns that calls are quick, and lets requests share them
            await score(rewarder, "warm")
        assert rewarder._each_s < 0.05
        scores = await score(rewarder, *["good"] * 10, "hang", *["good"] * 10)
        assert [s.reward for s in scores] == [1.0] * 10 + [None] + [1.0] * 10
        assert rewarder.meter.totals["errors"] == 1
        shared = [event for event in rewarder.events if "+" in event.subject_id]
        assert shared, "no call was shared: the test shows nothing"


async def test_a_group_that_hangs_fails_whole_and_the_next_is_scored():
    async with pool(unit="group") as rewarder:
        bad, good = await asyncio.gather(score(rewarder, "a", "hang"), score(rewarder, "a", "b"))
        assert [s.reward for s in bad] == [None, None]
        assert [s.reward for s in good] == [1.0, 1.0]
        assert rewarder.meter.totals["timeouts"] == 1


async def test_a_reward_that_kills_its_worker_twice_has_failed():
    async with pool() as rewarder:
        scores = await score(rewarder, "a", "die", "b")
        assert [s.reward for s in scores] == [1.0, None, 1.0]
        assert "died twice" in scores[1].error
        assert rewarder.meter.totals["deaths"] >= 2
        assert rewarder.meter.totals["replacements"] >= 2


@pytest.mark.parametrize("unit", ["sample", "group"])
async def test_sigkill_in_the_middle_of_a_call_costs_no_score(unit):
    async with pool(unit=unit, timeout_s=20.0) as rewarder:
        [before] = rewarder.pids
        scoring = asyncio.create_task(score(rewarder, "slow", "slow", "good"))
        while rewarder.in_progress == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        os.kill(before, signal.SIGKILL)
        assert [s.reward for s in await scoring] == [1.0, 1.0, 1.0]
        assert rewarder.pids != [before]
        assert rewarder.meter.totals["deaths"] == 1
        assert rewarder.meter.totals["replacements"] == 1
        assert rewarder.meter.totals["errors"] == 0


async def test_sigkill_of_an_idle_worker_costs_no_score():
    async with pool() as rewarder:
        await score(rewarder, "warm")
        os.kill(rewarder.pids[0], signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert [s.reward for s in await score(rewarder, "a", "b")] == [1.0, 1.0]
        assert rewarder.meter.totals["deaths"] == 1


async def test_a_stopped_worker_is_one_that_hangs():
    async with pool() as rewarder:
        before = rewarder.pids[0]
        os.kill(before, signal.SIGSTOP)
        assert [s.reward for s in await score(rewarder, "a")] == [None]
        assert [s.reward for s in await score(rewarder, "a")] == [1.0]
        assert_gone(before)


async def test_every_kind_of_failure_at_once_over_two_workers_with_kills():
    random_ = random.Random(7)
    kinds = {
        "good": 1.0,
        "none": None,
        "nan": None,
        "string": None,
        "short": None,
        "raise": None,
        "hang": None,
        "die": None,
    }
    completions = [
        random_.choice(["good", "good", "good", "none", "nan", "string", "short", "raise"]) for _ in range(150)
    ]
    completions[20] = completions[90] = "hang"
    completions[50] = "die"
    async with pool(workers=2, timeout_s=2.0) as rewarder:
        groups = [asyncio.create_task(score(rewarder, *completions[i : i + 5])) for i in range(0, 150, 5)]
        for _ in range(2):
            await asyncio.sleep(random_.uniform(0.1, 0.4))
            if pids := [pid for pid in rewarder.pids if pid]:
                os.kill(random_.choice(pids), signal.SIGKILL)
        scores = [s for group in await asyncio.gather(*groups) for s in group]
        assert len(scores) == 150
        for completion, s in zip(completions, scores, strict=True):
            if completion != "die" and s.error is not None and "died twice" in s.error:
                continue  # both random kills may hit one sample
            assert s.reward == kinds[completion]
            assert (s.error is not None) == (completion not in ("good", "none"))
        assert rewarder.meter.totals["scores"] == 150
        assert rewarder.meter.totals["errors"] == sum(s.error is not None for s in scores)
        assert rewarder.queued == rewarder.in_progress == 0
        assert [s.reward for s in await score(rewarder, "good", "good")] == [1.0, 1.0]


async def test_without_any_worker_left_every_request_is_answered(tmp_path, monkeypatch):
    file = tmp_path / "once.py"
    file.write_text("import os\ndef f(completions, **c): os._exit(1)\n")
    monkeypatch.setattr(pool_module, "RESPAWN_WAITS_S", (0.0, 0.05))
    runtime = ProcessRuntime(lambda event: None)
    config = RewardConfig(functions=(RewardFunctionConfig(use=f"{file}:f"),), workers=1, on_error="zero")
    rewarder = build_rewarder(config, runtime, lambda event: None, tmp_path)
    try:
        async with asyncio.timeout(NO_HANG_S):
            await rewarder.start()
            file.write_text("raise RuntimeError('the file was changed while the run was on')\n")
            scores = await score(rewarder, "a", "b", "c")
            assert [s.reward for s in scores] == [0.0, 0.0, 0.0]
            assert all("no reward worker is left" in s.error and "file was changed" in s.error for s in scores)
            [late] = await score(rewarder, "late")
            assert "no reward worker is left" in late.error
    finally:
        await rewarder.close()
        await runtime.close()


async def test_closing_answers_what_waits_and_does_not_wait_for_what_hangs():
    async with pool(timeout_s=600.0) as rewarder:
        scoring = asyncio.create_task(score(rewarder, "hang", "a"))
        while rewarder.in_progress == 0:
            await asyncio.sleep(0.01)
        pid = rewarder.pids[0]
        started = asyncio.get_running_loop().time()
        await rewarder.close()
        assert asyncio.get_running_loop().time() - started < 3.0
        assert all("closed" in s.error for s in await scoring)
        assert_gone(pid)


async def test_a_cancelled_caller_leaves_the_queue_and_the_rest_goes_on():
    async with pool(timeout_s=30.0) as rewarder:
        first = asyncio.create_task(score(rewarder, "slow"))
        while rewarder.in_progress == 0:
            await asyncio.sleep(0.01)
        given_up = asyncio.create_task(score(rewarder, "hang", "hang"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rewarder.queued == 2
        given_up.cancel()
        last = asyncio.create_task(score(rewarder, "good"))
        assert [s.reward for s in [*await first, *await last]] == [1.0, 1.0]
        assert rewarder.queued == 0
        assert rewarder.meter.totals["timeouts"] == 0
