"""User functions: found where the config says, called in the shape that their parameters name."""

import asyncio
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.protocols import RewardRequest
from headrace.reward.combine import Combiner
from headrace.reward.config import RewardConfig, RewardFunctionConfig
from headrace.reward.functions import load_functions
from headrace.reward.rules import RULES
from headrace.types import Task

FOLDER = Path(__file__).parent


def request(completion, prompt="p", source="test", **columns):
    return RewardRequest(
        task=Task(task_id="t", source=source, payload={"prompt": prompt} | columns),
        prompt=prompt,
        completion=completion,
    )


def load(*specs, folder=FOLDER):
    specs = [{"use": spec} if isinstance(spec, str) else spec for spec in specs]
    own = [s["use"].isidentifier() and s["use"] not in RULES for s in specs]
    specs = [s | {"use": f"user_rewards.py:{s['use']}"} if mine else s for s, mine in zip(specs, own, strict=True)]
    return load_functions(RewardConfig(functions=tuple(RewardFunctionConfig(**spec) for spec in specs)), folder)


def rewards(functions, *requests):
    scores, _ = asyncio.run(Combiner(functions, "exclude", 5.0).score(requests))
    return [score.reward if score.error is None else score.error for score in scores]


def test_trl_shape_gets_lists_and_columns():
    assert rewards(load("by_length"), request("ab"), request("")) == [2.0, 0.0]
    assert rewards(load("plain"), request("a", answer="a"), request("a", answer="b")) == [1.0, 0.0]


def test_a_column_that_only_some_tasks_have_is_none_elsewhere():
    assert rewards(load("plain"), request("a", answer="a"), request("a")) == [1.0, 0.0]


def test_conversational_prompts_come_with_conversational_completions():
    chat = [{"role": "user", "content": "hi"}]
    assert rewards(load("chat_roles"), request("hi", chat), request("ho", chat)) == [1.0, 0.0]


def test_async_functions_wait_side_by_side():
    async def timed():
        loop = asyncio.get_running_loop()
        started = loop.time()
        await Combiner(load("waits"), "exclude", 5.0).score([request(str(i)) for i in range(10)])
        return loop.time() - started

    assert rewards(load("waits"), request("3"), request("4")) == [3.0, 4.0]
    assert asyncio.run(timed()) < 1.0


@pytest.mark.parametrize("name", ["compute_score", "compute_score_short", "compute_score_async"])
def test_verl_shape_sync_and_async(name):
    assert rewards(load(name), request("7", answer="7"), request("8", answer="7")) == [1.0, 0.0]


def test_verl_reads_the_ground_truth_where_verl_puts_it():
    nested = request("7", reward_model={"ground_truth": "7", "style": "rule"}, answer="0")
    direct = request("7", ground_truth="7", answer="0")
    assert rewards(load("compute_score"), nested, direct) == [1.0, 1.0]


def test_options_are_keyword_arguments_and_callable_objects_work():
    assert rewards(load({"use": "scaled", "options": {"scale": 0.25}}), request("a")) == [0.25]
    assert rewards(load("marker"), request("a")) == [2.0]


def test_a_group_function_gets_the_whole_group_at_once():
    functions = load({"use": "centred", "unit": "group"})
    assert rewards(functions, request("1"), request("2"), request("6")) == [-2.0, -1.0, 3.0]


def test_a_missing_column_is_named_in_the_error():
    [error] = rewards(load("needs_a_column"), request("a"))
    assert "rubric" in error


def test_an_import_path_is_looked_up_on_the_interpreters_own(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        assert rewards(load({"use": "user_rewards:by_length"}), request("ab")) == [2.0]
    finally:
        sys.modules.pop("user_rewards", None)


def test_only_the_named_file_is_imported(tmp_path):
    (tmp_path / "neighbour.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text("import neighbour\ndef f(completions, **c): return [1.0]\n")
    before = list(sys.path)
    with pytest.raises(ConfigError, match="No module named 'neighbour'"):
        load({"use": "mine.py:f"}, folder=tmp_path)
    assert sys.path == before


def test_names_are_the_functions_own_and_unique():
    functions = load("by_length", {"use": "by_length", "weight": 2.0}, {"use": "by_length", "name": "len"}, "marker")
    assert [function.name for function in functions] == ["by_length", "by_length_2", "len", "Marker"]
    assert [function.weight for function in functions] == [1.0, 2.0, 1.0, 1.0]


BROKEN = "raise RuntimeError('broken on purpose')\n"


@pytest.mark.parametrize(
    ("spec", "key", "words"),
    [
        ({"use": "exakt:"}, "use", "valid: exact, numeric"),
        ({"use": "exakt.py"}, "use", "valid: exact, numeric"),
        ({"use": "absent.py:f"}, "use", "no such file"),
        ({"use": "absent_package.module:f"}, "use", "absent_package/module.py:function"),
        ({"use": "user_rewards.py:absent"}, "use", "its functions: by_length, plain"),
        ({"use": "user_rewards.py:not_callable"}, "use", "is a int"),
        ({"use": "user_rewards.py:Marker"}, "use", "is a class"),
        ({"use": "no_shape"}, "use", "takes (text); wanted (prompts, completions, **columns)"),
        ({"use": "positional"}, "use", "wanted (prompts, completions, **columns)"),
        ({"use": "verl_with_more"}, "use", "needs 'judge'"),
        ({"use": "compute_score", "unit": "group"}, "unit", "one sample a call"),
        ({"use": "plain", "options": {"scale": 1.0}}, "options.scale", "cannot be given it"),
        ({"use": "headrace.errors:UserError"}, "use", "is a class"),
        ({"use": "exact", "unit": "group"}, "unit", "one by one"),
        ({"use": "exact", "shape": "trl"}, "shape", "one by one"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_key(spec, key, words):
    with pytest.raises(ConfigError) as caught:
        load("by_length", spec)
    assert str(caught.value).startswith(f"reward.functions[1].{key}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_raises_or_exits_at_import_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "exits.py").write_text("raise SystemExit(1)\n")
    with pytest.raises(ConfigError, match="RuntimeError: broken on purpose"):
        load({"use": "broken.py:f"}, folder=tmp_path)
    with pytest.raises(ConfigError, match="SystemExit"):
        load({"use": "exits.py:f"}, folder=tmp_path)


def test_no_function_at_all_and_a_name_given_twice_are_refused():
    with pytest.raises(ConfigError, match=r"reward\.functions: empty"):
        load_functions(RewardConfig(), FOLDER)
    with pytest.raises(ConfigError, match=r"reward\.functions\[1\]\.name"):
        load({"use": "by_length", "name": "x"}, {"use": "plain", "name": "x"})
