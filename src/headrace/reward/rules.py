"""Turns a built-in rule's name and options into a function from one request to one number, without any user code.

A rule reads what it needs from `request.task.payload` (the answer stands in column "answer" unless `column` says
otherwise) and raises `ValueError` in plain words when the task does not have it: a failed score, not a wrong answer.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from headrace.errors import ConfigError, MissingExtra
from headrace.protocols import RewardRequest

Rule = Callable[[RewardRequest], float | None]

MAX_INTEGER_DIGITS = 4000
"""Python refuses to convert longer ones; no task has such an answer."""

INTEGER = re.compile(rf"[+-]?[0-9]{{1,{MAX_INTEGER_DIGITS}}}")
PLAIN_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def read_column(request: RewardRequest, column: str) -> Any:
    """The task's value in `column`; a `ValueError` that lists the columns there are when it is missing or None."""
    value = request.task.payload.get(column)
    if value is None:
        have = ", ".join(sorted(name for name in request.task.payload if name != "prompt")) or "none"
        raise ValueError(f"the task has no column {column!r} (columns: {have})")
    return value


def exact(*, column: str = "answer", strip: bool = True, ignore_case: bool = False) -> Rule:
    """1 when the whole completion is the answer, surrounding white space aside, else 0."""

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    def rule(request: RewardRequest) -> float:
        return float(normal(request.completion) == normal(str(read_column(request, column))))

    return rule


def first_number(*, column: str = "answer") -> Rule:
    """1 when the first integer in the completion (ASCII digits, a minus sign right before them counts) is the answer."""

    def rule(request: RewardRequest) -> float:
        answer = str(read_column(request, column)).strip()
        if not INTEGER.fullmatch(answer):
            raise ValueError(f"column {column!r} holds {answer[:40]!r}, which is not an integer")
        found = re.search(r"-?[0-9]+", request.completion)
        return float(bool(found and INTEGER.fullmatch(found.group()) and int(found.group()) == int(answer)))

    return rule


def regex(*, pattern: str = "", column: str = "", ignore_case: bool = False, whole: bool = False) -> Rule:
    """1 when `pattern` is found in the completion (`whole`: matches all of it); "." matches newlines too.

    With `column`, the last match's first group (all of the match when it has none) must also equal that column,
    surrounding white space aside.
    """
    if not pattern:
        raise ValueError("the option `pattern` is missing")
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except re.error as error:
        raise ValueError(f"the option `pattern` is not a regular expression: {error}") from None

    def rule(request: RewardRequest) -> float:
        if whole:
            match = compiled.fullmatch(request.completion)
        else:
            match = None
            for match in compiled.finditer(request.completion):  # noqa: B007  the last one is wanted
                if not column:
                    break
        if match is None or not column:
            return float(match is not None)
        found = match.group(1) if compiled.groups else match.group()
        return float((found or "").strip() == str(read_column(request, column)).strip())

    return rule


LENGTH_UNITS: dict[str, Callable[[RewardRequest], int]] = {
    "tokens": lambda request: len(request.token_ids),
    "characters": lambda request: len(request.completion),
    "words": lambda request: len(request.completion.split()),
}


def length(
    *,
    max: int = 0,
    min: int = 0,
    margin: int = 0,
    unit: Literal["tokens", "characters", "words"] = "tokens",
) -> Rule:
    """A penalty: 0 between `min` and `max - margin`, falling linearly to -1 at `max` and at length 0; -1 beyond `max`.

    `max` itself is allowed when `margin` is 0.
    """
    if max <= 0 and min <= 0:
        raise ValueError("give the option `max`, `min` or both, above 0")
    if unit not in LENGTH_UNITS:
        raise ValueError(f"the option `unit` is {unit!r}; valid: {', '.join(LENGTH_UNITS)}")
    if margin < 0 or (max > 0 and (margin > max or min > max - margin)):
        raise ValueError(f"min {min}, max {max} and margin {margin} leave no length without a penalty")
    count = LENGTH_UNITS[unit]

    def rule(request: RewardRequest) -> float:
        if unit == "tokens" and not request.token_ids and request.completion:
            raise ValueError("the request carries no token ids; count `unit` characters or words")
        size = count(request)
        if size < min:
            return size / min - 1.0
        if max <= 0 or size <= max - margin:
            return 0.0
        return -1.0 if size >= max else -(size - (max - margin)) / margin

    return rule


def numeric(*, column: str = "answer", timeout_s: int = 5) -> Rule:
    """1 when math-verify finds the completion's final expression equal to the answer, else 0.

    An answer that ends in ``#### 42`` stands for 42. An expression that takes longer than `timeout_s` counts as wrong
    where an alarm can be set; elsewhere the pool's own limit ends it.
    """

    from math_verify import parse, verify  # here and not in the rule: a slow import counts against no call's limit

    def rule(request: RewardRequest) -> float:
        answer = str(read_column(request, column)).rsplit("####", 1)[-1].strip()
        if _same_plain_number(answer, request.completion.strip()):
            return 1.0
        limit_s = timeout_s if timeout_s > 0 and _alarm_is_free() else None
        gold = _parse_answer(answer, limit_s)
        if not gold:
            raise ValueError(f"column {column!r} holds {answer[:40]!r}, in which math-verify finds no expression")
        found = parse(request.completion, parsing_timeout=limit_s, raise_on_error=False)
        return float(bool(verify(list(gold), found, timeout_seconds=limit_s, raise_on_error=False)))

    return rule


def _same_plain_number(answer: str, completion: str) -> bool:
    """Whether both texts are plain decimal numbers and equal; spares the commonest right answers a parser."""
    if not all(len(text) <= 64 and PLAIN_NUMBER.fullmatch(text) for text in (answer, completion)):
        return False
    return Fraction(answer) == Fraction(completion)


def _alarm_is_free() -> bool:
    """math-verify limits itself by SIGALRM: possible only in the main thread, and rude where another owns the signal."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None)


@lru_cache(maxsize=1024)
def _parse_answer(answer: str, limit_s: int | None) -> tuple[Any, ...]:
    """The answer as math-verify's expressions; siblings share one parse. LaTeX without delimiters is tried with them."""
    from math_verify import parse

    for text in (answer, f"${answer}$"):
        if found := parse(text, parsing_timeout=limit_s, raise_on_error=False):
            return tuple(found)
    return ()


def task(*, partial: bool = False, column: str = "reasoning_gym") -> Rule:
    """The task's own verifier. For reasoning_gym tasks the column holds ``{"dataset": name, "entry": entry}``.

    Several of its verifiers give credit for merely containing the answer, so 1 only for a full score; `partial`
    hands the raw score on. What stands in the last ``<answer>`` tag is the answer, else the whole completion.
    """
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError:
        raise MissingExtra("reasoning-gym", "reasoning-gym", "the reward rule `task`") from None

    def rule(request: RewardRequest) -> float:
        dataset, entry = _reasoning_gym_entry(read_column(request, column), column)
        tagged = re.findall(r"<answer>(.*?)</answer>", request.completion, re.DOTALL)
        answer = (tagged[-1] if tagged else request.completion).strip()
        score = float(get_score_answer_fn(dataset)(answer, entry))
        return score if partial else float(score == 1.0)

    return rule


def _reasoning_gym_entry(value: Any, column: str) -> tuple[str, dict[str, Any]]:
    """Dataset name and entry of a reasoning_gym column, which may be JSON text."""
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        entry = value.get("entry")
        entry = json.loads(entry) if isinstance(entry, str) else entry
        dataset = value.get("dataset") or value.get("name")
        if isinstance(entry, dict) and isinstance(dataset, str):
            return dataset, entry
    raise ValueError(f"column {column!r} should hold {{'dataset': name, 'entry': entry}}, found {str(value)[:60]!r}")


RULES: dict[str, Callable[..., Rule]] = {
    "exact": exact,
    "numeric": numeric,
    "regex": regex,
    "length": length,
    "first_number": first_number,
    "task": task,
}


def build_rule(name: str, options: Mapping[str, Any], path: str) -> Rule:
    """The rule called `name`; `path` is the config key that errors speak of."""
    maker = RULES[name]
    defaults = maker.__kwdefaults__ or {}
    for option, value in options.items():
        if option not in defaults:
            raise ConfigError(f"{path}.options.{option}", f"{name!r} has no such option; valid: {', '.join(defaults)}")
        if type(value) is not type(defaults[option]):
            wanted = type(defaults[option]).__name__
            raise ConfigError(f"{path}.options.{option}", f"found {value!r}; {name!r} wants a value of type {wanted}")
    try:
        return maker(**options)
    except ValueError as error:
        raise ConfigError(f"{path}.options", f"{name!r}: {error}") from None
