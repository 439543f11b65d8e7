"""Parts into scores: what counts, what is left out, what is a failure."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest

from headrace.protocols import RewardRequest
from headrace.reward.combine import Combiner, Failure, combine, failed_score, read_list, read_part, shorten
from headrace.reward.config import RewardConfig, RewardFunctionConfig
from headrace.reward.functions import load_functions
from headrace.types import Task

FOLDER = Path(__file__).parent


def score(specs, *completions, on_error="exclude", timeout_s=5.0, **columns):
    task = Task(task_id="t", source="test", payload={"prompt": "p"} | columns)
    requests = [RewardRequest(task=task, prompt="p", completion=completion) for completion in completions]
    specs = [RewardFunctionConfig(**({"use": spec} if isinstance(spec, str) else spec)) for spec in specs]
    functions = load_functions(RewardConfig(functions=tuple(specs)), FOLDER)
    return asyncio.run(Combiner(functions, on_error, timeout_s).score(requests))


SAYS = "user_rewards.py:what_it_says"


def test_weighted_sum_of_named_parts():
    [both], _ = score(
        [
            {"use": "exact", "weight": 2.0},
            {"use": "length", "weight": 0.5, "options": {"min": 4, "unit": "characters"}},
        ],
        "48",
        answer="48",
    )
    assert both.reward == 2.0 * 1.0 + 0.5 * -0.5
    assert both.parts == {"exact": 1.0, "length": -0.5}
    assert both.error is None


def test_a_none_part_is_left_out_and_only_none_is_no_reward():
    (one, none), _ = score([{"use": "exact", "weight": 3.0}, SAYS], "a", "none", answer="a")
    assert (one.reward, one.parts) == (4.0, {"exact": 1.0, "what_it_says": 1.0})
    assert (none.reward, none.parts, none.error) == (0.0, {"exact": 0.0, "what_it_says": None}, None)
    [alone], _ = score([SAYS], "none")
    assert (alone.reward, alone.error) == (None, None)


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        ("raise", "ValueError: asked to"),
        ("exit", "SystemExit: 3"),
        ("nan", "not finite: nan"),
        ("inf", "not finite: inf"),
        ("string", "wrong type: str '1.0'"),
        ("list", "wrong type: list"),
        ("short", "wrong length: 0 values for 1"),
        ("text", "wrong type: str, wanted a list of 1"),
    ],
)
@pytest.mark.parametrize("on_error", ["exclude", "zero"])
def test_a_bad_sample_fails_alone(completion, words, on_error):
    (before, bad, after), timeouts = score(
        [SAYS, "exact"], "good", completion, "fine", on_error=on_error, answer="fine"
    )
    assert (before.reward, before.error) == (1.0, None)
    assert (after.reward, after.error) == (2.0, None)
    assert bad.reward == (None if on_error == "exclude" else 0.0)
    assert bad.error.startswith("what_it_says: ") and words in bad.error
    assert bad.parts == {"what_it_says": None, "exact": 0.0}
    assert timeouts == 0


def test_a_group_function_that_fails_fails_its_group():
    group = {"use": SAYS, "unit": "group"}
    scores, _ = score([group], "good", "raise")
    assert [s.reward for s in scores] == [None, None]
    assert all("ValueError" in s.error for s in scores)


def test_an_async_function_that_waits_too_long_fails_alone():
    (good, bad), timeouts = score(["user_rewards.py:waits_for_ever"], "good", "hang", timeout_s=0.2)
    assert (good.reward, bad.reward, timeouts) == (1.0, None, 1)
    assert "no answer after 0.2 s" in bad.error


def test_no_requests_is_no_scores():
    assert score(["user_rewards.py:by_length"]) == ([], 0)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.array([2.0]), 2.0),
        (np.bool_(True), 1.0),
        ({"score": 0.5, "acc": True}, 0.5),
        ({"score": None}, None),
    ],
)
def test_numbers_in_their_forms(raw, part):
    assert read_part(raw) == part


@pytest.mark.parametrize(
    "raw", ["1", b"1", [1.0], {}, {"acc": 1}, np.zeros(2), math.nan, -math.inf, 10**400, 1j, object()]
)
def test_what_is_no_finite_number_is_a_failure(raw):
    assert isinstance(read_part(raw), Failure)


def test_lists_in_their_forms():
    assert read_list((1, None), 2) == [1.0, None]
    assert read_list(np.array([1.0, 2.0]), 2) == [1.0, 2.0]
    for raw in (None, 1.0, {0: 1.0}, {1.0}, iter([1.0]), "a"):
        assert isinstance(read_list(raw, 1), Failure)
    assert isinstance(read_list(np.array(1.0), 1), Failure)


def test_a_sum_beyond_the_range_is_a_failed_score():
    huge = combine({"a": 1e308, "b": 1e308}, {"a": 1.0, "b": 1.0}, "exclude")
    assert huge.reward is None and "not finite" in huge.error
    opposed = combine({"a": 1e308, "b": -1e308}, {"a": 1e10, "b": 1e10}, "zero")
    assert opposed.reward == 0.0 and "not finite" in opposed.error


def test_errors_are_one_short_line():
    error = failed_score("a\nb " + "c" * 1000, "exclude").error
    assert error.startswith("a b c") and len(error) == 300
    assert shorten("short") == "short"
