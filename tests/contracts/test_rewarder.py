"""The contract of `Rewarder`, over every implementation: in this process, and pooled on each runtime."""

import asyncio
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.protocols import RewardRequest
from headrace.reward.config import RewardConfig, RewardFunctionConfig
from headrace.reward.inline import InlineRewarder
from headrace.reward.pool import build_rewarder
from headrace.types import Task

USER_REWARDS = str(Path(__file__).parent.parent / "reward" / "user_rewards.py")
IMPLEMENTATIONS = {"inline": (None, 0), "local": (LocalRuntime, 2), "processes": (ProcessRuntime, 1)}


def request(completion, task_id="t", prompt="p", **columns):
    task = Task(task_id=task_id, source="test", payload={"prompt": prompt} | columns)
    return RewardRequest(task=task, prompt=prompt, completion=completion)


@pytest.fixture(params=IMPLEMENTATIONS)
async def build(request):
    runtime_type, workers = IMPLEMENTATIONS[request.param]
    events, rewarders = [], []
    runtime = runtime_type(events.append) if runtime_type else None

    async def make(*specs, **settings):
        functions = tuple(
            RewardFunctionConfig(**(spec | {"use": spec["use"].replace("user:", f"{USER_REWARDS}:")})) for spec in specs
        )
        config = RewardConfig(functions=functions, workers=workers, **settings)
        rewarder = build_rewarder(config, runtime, events.append, Path("."))
        rewarders.append(rewarder)
        await rewarder.start()
        rewarder.events = events
        return rewarder

    yield make
    for rewarder in rewarders:
        await rewarder.close()
    if runtime is not None:
        await runtime.close()


async def test_one_score_for_each_request_in_order(build):
    rewarder = await build({"use": "user:by_length"}, {"use": "exact", "weight": 10.0})
    assert rewarder.unit == "sample"
    assert await rewarder.score([]) == []
    [single] = await rewarder.score([request("ab", answer="ab")])
    assert (single.reward, single.parts) == (12.0, {"by_length": 2.0, "exact": 1.0})
    many = await rewarder.score([request("x" * n, answer="xxx") for n in range(20)])
    assert [score.reward for score in many] == [float(n) + 10.0 * (n == 3) for n in range(20)]


async def test_many_callers_at_once_each_get_their_own(build):
    rewarder = await build({"use": "user:by_length"})
    answers = await asyncio.gather(*(rewarder.score([request("x" * n), request("")]) for n in range(30)))
    assert [[score.reward for score in scores] for scores in answers] == [[float(n), 0.0] for n in range(30)]


async def test_a_function_that_turns_out_to_wait_waits_for_all_at_once(build):
    """What it gives is how many wait beside it. A pool cuts requests into calls as time allows, this process does not."""
    rewarder = await build({"use": "user:asks"})
    alone = [await rewarder.score([request("x")]) for _ in range(2)]
    assert [scores[0].reward for scores in alone] == [1.0, 1.0]
    many = await rewarder.score([request("x") for _ in range(9)])
    callers = await asyncio.gather(*(rewarder.score([request("x")]) for _ in range(4)))
    if isinstance(rewarder, InlineRewarder):
        assert [score.reward for score in many] == [9.0] * 9
        assert [scores[0].reward for scores in callers] == [4.0] * 4
    else:
        assert all(score.reward >= 1.0 for score in many)


async def test_a_cancelled_caller_takes_nobody_with_it(build):
    rewarder = await build({"use": "user:by_length"})
    callers = [asyncio.ensure_future(rewarder.score([request("x" * n)])) for n in range(4)]
    await asyncio.sleep(0)
    callers[1].cancel()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError)
    assert [found[n][0].reward for n in (0, 2, 3)] == [0.0, 2.0, 3.0]


async def test_a_failure_is_a_score_and_its_neighbours_keep_theirs(build):
    rewarder = await build({"use": "user:what_it_says"})
    bad = ["raise", "exit", "nan", "inf", "string", "short", "text", "list"]
    completions = [text for name in bad for text in (name, "good")]
    scores = await rewarder.score([request(text) for text in completions])
    assert [score.reward for score in scores] == [None, 1.0] * len(bad)
    assert [score.error is not None for score in scores] == [True, False] * len(bad)
    metrics = rewarder.metrics()
    assert metrics["reward/errors"].total == len(bad)
    assert rewarder.meter.totals["scores"] == len(completions)


async def test_on_error_zero_gives_zero_and_says_why(build):
    rewarder = await build({"use": "user:what_it_says"}, on_error="zero")
    bad, none = await rewarder.score([request("raise"), request("none")])
    assert (bad.reward, none.reward, none.error) == (0.0, None, None)
    assert "ValueError" in bad.error
    assert rewarder.metrics()["reward/none"].total == 1


async def test_a_group_function_makes_the_unit_the_group(build):
    rewarder = await build({"use": "user:group_size", "unit": "group"}, {"use": "user:by_length"})
    assert rewarder.unit == "group"
    groups = await asyncio.gather(*(rewarder.score([request("ab")] * n) for n in (1, 3, 5)))
    assert [[score.reward for score in scores] for scores in groups] == [[n + 2.0] * n for n in (1, 3, 5)]


async def test_async_functions_overlap(build):
    rewarder = await build({"use": "user:waits"})
    loop = asyncio.get_running_loop()
    started = loop.time()
    scores = await rewarder.score([request(str(n)) for n in range(24)])
    assert [score.reward for score in scores] == [float(n) for n in range(24)]
    assert loop.time() - started < 2.4, "as long as one after another with two workers"


async def test_an_async_function_that_waits_for_ever_ends_at_its_limit(build):
    rewarder = await build({"use": "user:waits_for_ever"}, timeout_s=0.5)
    scores = await rewarder.score([request(text) for text in ("a", "hang", "b")])
    assert [score.reward for score in scores] == [1.0, None, 1.0]
    assert "no answer after 0.5 s" in scores[1].error
    assert rewarder.metrics()["reward/timeouts"].total == 1
    [after] = await rewarder.score([request("c")])
    assert after.reward == 1.0


async def test_each_call_is_an_event_of_a_reward_worker(build):
    rewarder = await build({"use": "user:what_it_says"})
    await rewarder.score([request("slow", task_id="first")])
    [event] = [event for event in rewarder.events if event.kind == "score"]
    assert event.source.startswith("reward-")
    assert event.subject_id == "first"
    assert 0.25e9 < event.duration_ns < 5e9
    assert abs(event.time_ns * 1e-9 + event.duration_ns * 1e-9 - asyncio.get_running_loop().time()) < 5.0


async def test_metrics_are_those_since_the_last_ones(build):
    rewarder = await build({"use": "user:what_it_says"})
    await rewarder.score([request("slow")])
    first, second = rewarder.metrics(), rewarder.metrics()
    assert 0.0 < first["reward/scores_per_s"].mean <= 1 / 0.3
    assert first["reward/score_s"].weight == 1 and 0.3 <= first["reward/score_s"].mean < 5
    assert 0.0 <= first["reward/idle_share"].mean < 1.0
    assert first["reward/queue_depth"].mean == 0
    assert second["reward/scores_per_s"].total == 0 and second["reward/score_s"].weight == 0
    assert second["reward/idle_share"].mean == 1.0


async def test_a_function_that_cannot_be_used_is_a_config_error_at_start(build):
    with pytest.raises(ConfigError, match=r"reward\.functions\[0\]\.use: .* has no 'absent'"):
        await build({"use": "user:absent"})


async def test_close_is_idempotent_and_start_too(build):
    rewarder = await build({"use": "user:by_length"})
    await rewarder.start()
    await rewarder.close()
    await rewarder.close()


async def test_user_files_leave_no_module_under_their_own_name(build):
    rewarder = await build({"use": "user:by_length"})
    await rewarder.score([request("a")])
    assert "user_rewards" not in sys.modules
