"""Built-in rules against completions with known worth."""

import signal
import threading
import time

import pytest

from headrace.errors import ConfigError
from headrace.protocols import RewardRequest
from headrace.reward.rules import RULES, build_rule
from headrace.types import Task


def request(completion, token_ids=(), **columns):
    payload = {"prompt": "p"} | columns
    task = Task(task_id="t", source="test", payload=payload)
    return RewardRequest(task=task, prompt="p", completion=completion, token_ids=tuple(token_ids))


def score(rule, completion, token_ids=(), options=None, **columns):
    return build_rule(rule, options or {}, "reward.functions[0]")(request(completion, token_ids, **columns))


@pytest.mark.parametrize(
    ("completion", "answer", "options", "right"),
    [
        (" 48\n", "48", {}, 1.0),
        ("48", 48, {}, 1.0),
        ("48.", "48", {}, 0.0),
        ("", "48", {}, 0.0),
        ("yes", "YES", {}, 0.0),
        ("yes", "YES", {"ignore_case": True}, 1.0),
        (" yes", "yes", {"strip": False}, 0.0),
    ],
)
def test_exact(completion, answer, options, right):
    assert score("exact", completion, options=options, answer=answer) == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (" 48\n12 + 3", 48, 1.0),
        ("it is 48!", "48", 1.0),
        ("12 then 48", 48, 0.0),
        ("480", 48, 0.0),
        ("-48", 48, 0.0),
        ("-48", -48, 1.0),
        ("048", 48, 1.0),
        ("no digits", 48, 0.0),
        ("", 48, 0.0),
        ("٤٨", 48, 0.0),
        ("9" * 10_000, 48, 0.0),
    ],
)
def test_first_number(completion, answer, right):
    assert score("first_number", completion, answer=answer) == right


def test_first_number_refuses_an_answer_that_is_none():
    with pytest.raises(ValueError, match="not an integer"):
        score("first_number", "4", answer="four")


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("42", "42", 1.0),
        ("42.0", 42, 1.0),
        ("so the result is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{1/3}", "\\frac{1}{3}", 1.0),
        ("the answer is 41", "42", 0.0),
        ("", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("The answer is 72", "48+24=<<48+24=72>>72 clips\n#### 72", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
    ],
)
def test_numeric(completion, answer, right):
    assert score("numeric", completion, answer=answer) == right


def test_numeric_leaves_signals_as_they_were_and_works_in_a_thread():
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert score("numeric", "$\\frac{2}{4}$", answer="0.5") == 1.0
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before
    results = []
    thread = threading.Thread(target=lambda: results.append(score("numeric", "$\\frac{2}{4}$", answer="0.50")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_numeric_ends_what_takes_too_long_where_the_alarm_is_free(monkeypatch):
    import math_verify

    # pytest-timeout owns the alarm here; lend it to the rule for a moment
    left_s = signal.setitimer(signal.ITIMER_REAL, 0)[0]
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        original = math_verify.parser.extract_target_from_pred
        monkeypatch.setattr(
            math_verify.parser,
            "extract_target_from_pred",
            lambda text, *args, **kw: time.sleep(30) if "slow" in text else original(text, *args, **kw),
        )
        started = time.monotonic()
        assert score("numeric", "slow $\\frac{1}{2}$", options={"timeout_s": 1}, answer="0.5") == 0.0
        assert time.monotonic() - started < 10
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left_s)


@pytest.mark.parametrize(
    ("completion", "options", "columns", "right"),
    [
        ("<answer>7</answer>", {"pattern": "<answer>.*</answer>"}, {}, 1.0),
        ("7", {"pattern": "<answer>.*</answer>"}, {}, 0.0),
        ("a\n<b>", {"pattern": "a.<b>"}, {}, 1.0),
        ("xABx", {"pattern": "ab"}, {}, 0.0),
        ("xABx", {"pattern": "ab", "ignore_case": True}, {}, 1.0),
        ("xabx", {"pattern": "ab", "whole": True}, {}, 0.0),
        ("<a> 7 </a>", {"pattern": "<a>(.*?)</a>", "column": "answer"}, {"answer": 7}, 1.0),
        ("<a>1</a><a>7</a>", {"pattern": "<a>(.*?)</a>", "column": "answer"}, {"answer": 7}, 1.0),
        ("<a>7</a><a>1</a>", {"pattern": "<a>(.*?)</a>", "column": "answer"}, {"answer": 7}, 0.0),
        ("none", {"pattern": "<a>(.*?)</a>", "column": "answer"}, {"answer": 7}, 0.0),
        ("n=7", {"pattern": "[0-9]+", "column": "key"}, {"key": "7"}, 1.0),
    ],
)
def test_regex(completion, options, columns, right):
    assert score("regex", completion, options=options, **columns) == right


@pytest.mark.parametrize(
    ("size", "options", "right"),
    [
        (5, {"max": 10}, 0.0),
        (10, {"max": 10}, 0.0),
        (11, {"max": 10}, -1.0),
        (8, {"max": 10, "margin": 4}, -0.5),
        (6, {"max": 10, "margin": 4}, 0.0),
        (10, {"max": 10, "margin": 4}, -1.0),
        (99, {"max": 10, "margin": 4}, -1.0),
        (1, {"min": 4}, -0.75),
        (0, {"min": 4}, -1.0),
        (4, {"min": 4}, 0.0),
    ],
)
def test_length(size, options, right):
    assert score("length", "x" * size, range(size), options) == pytest.approx(right)
    assert score("length", "x" * size, options=options | {"unit": "characters"}) == pytest.approx(right)
    assert score("length", "x " * size, options=options | {"unit": "words"}) == pytest.approx(right)


def test_length_in_tokens_needs_tokens():
    assert score("length", "", (), {"min": 4}) == -1.0
    with pytest.raises(ValueError, match="no token ids"):
        score("length", "text", (), {"min": 4})


def test_task_uses_the_verifier_of_reasoning_gym():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    column = {"dataset": "chain_sum", "entry": entry}
    right, wrong = entry["answer"], str(int(entry["answer"]) + 1)
    assert score("task", f" {right}\n", reasoning_gym=column) == 1.0
    assert score("task", f"thinking... <answer>{right}</answer> done", reasoning_gym=column) == 1.0
    assert score("task", wrong, reasoning_gym=column) == 0.0
    assert score("task", "", reasoning_gym=column) == 0.0


def test_task_counts_full_scores_only_unless_partial():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=1)[0]
    column = {"dataset": "gsm_symbolic", "entry": entry}
    contains = f"{entry['answer']}0000"
    raw = score("task", contains, options={"partial": True}, reasoning_gym=column)
    assert score("task", contains, reasoning_gym=column) == float(raw == 1.0) == 0.0


@pytest.mark.parametrize("value", ["{}", 3, {"dataset": "chain_sum"}, {"entry": {}}])
def test_task_refuses_a_column_of_another_form(value):
    with pytest.raises(ValueError):
        score("task", "1", reasoning_gym=value)


@pytest.mark.parametrize("rule", ["exact", "numeric", "first_number", "task"])
def test_a_missing_column_is_a_failure_with_the_columns_there_are(rule):
    with pytest.raises(ValueError, match=r"no column .* \(columns: other\)"):
        score(rule, "1", other=1)


@pytest.mark.parametrize(
    ("rule", "options", "key", "words"),
    [
        ("exact", {"colum": "x"}, "options.colum", "valid: column, strip, ignore_case"),
        ("exact", {"column": 3}, "options.column", "type str"),
        ("regex", {}, "options", "`pattern` is missing"),
        ("regex", {"pattern": "("}, "options", "not a regular expression"),
        ("length", {}, "options", "`max`, `min`"),
        ("length", {"max": 3, "unit": "lines"}, "options", "tokens, characters, words"),
        ("length", {"max": 3, "min": 5}, "options", "without a penalty"),
        ("numeric", {"timeout_s": True}, "options.timeout_s", "type int"),
    ],
)
def test_bad_options_name_their_key(rule, options, key, words):
    with pytest.raises(ConfigError) as caught:
        build_rule(rule, options, "reward.functions[2]")
    assert str(caught.value).startswith(f"reward.functions[2].{key}: ")
    assert words in str(caught.value)


def test_every_rule_is_reachable_by_name():
    assert sorted(RULES) == ["exact", "first_number", "length", "numeric", "regex", "task"]
