"""Turns requests and named, weighted functions into one `Score` for each request, whatever the functions do.

A part that is None is left out of the sum; a request with only such parts has reward None. A part that raises, is not
a finite number, or comes in a list of the wrong length makes the request's score a failed one: `error` says why.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.protocols import RewardRequest
from headrace.reward.functions import RewardFunction
from headrace.types import Score

OnError = Literal["exclude", "zero"]

MAX_ERROR_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands in a part's place when the function failed there."""

    error: str
    timed_out: bool = False


Part = float | None | Failure


def weighted_sum(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """sum_i w_i * part_i over the parts that are not None; None when there is none.

    Exactly rounded, so neither the order of the parts nor a part of weight 0 changes it.
    """
    terms = [weights[name] * value for name, value in parts.items() if value is not None]
    return math.fsum(terms) if terms else None


def failed_score(error: str, on_error: OnError, parts: Mapping[str, float | None] | None = None) -> Score:
    """The score of a request whose functions failed: excluded from its group, or 0."""
    return Score(reward=None if on_error == "exclude" else 0.0, parts=dict(parts or {}), error=shorten(error))


def shorten(text: str) -> str:
    """One line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_LENGTH else line[: MAX_ERROR_LENGTH - 3] + "..."


def combine(parts: Mapping[str, Part], weights: Mapping[str, float], on_error: OnError) -> Score:
    """One request's parts into its score."""
    values = {name: None if isinstance(part, Failure) else part for name, part in parts.items()}
    errors = [f"{name}: {part.error}" for name, part in parts.items() if isinstance(part, Failure)]
    if errors:
        return failed_score("; ".join(errors), on_error, values)
    try:
        reward = weighted_sum(values, weights)
    except (OverflowError, ValueError):  # fsum's answer to sums beyond the range, and to inf - inf
        reward = math.inf
    if reward is not None and not math.isfinite(reward):
        return failed_score("the weighted sum is not finite", on_error, values)
    return Score(reward=reward, parts=values)


def read_part(raw: Any) -> Part:
    """A function's own value for one request: a number, a one-element array, verl's dict with "score", or None."""
    if isinstance(raw, Mapping) and "score" in raw:
        raw = raw["score"]
    if raw is None:
        return None
    value = raw
    if not isinstance(value, (bool, int, float)) and getattr(value, "size", None) is not None:
        try:
            value = value.item()  # numpy and torch scalars
        except Exception:
            return Failure(f"wrong type: {type(raw).__name__} of more than one element")
    if not isinstance(value, (bool, int, float)):
        return Failure(f"wrong type: {type(raw).__name__} {str(raw)[:40]!r}, wanted a number or None")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    return value if math.isfinite(value) else Failure(f"not finite: {value}")


def read_list(raw: Any, count: int) -> list[Part] | Failure:
    """A TRL-shaped function's answer for `count` requests."""
    if isinstance(raw, (str, bytes, Mapping)) or not hasattr(raw, "__len__") or not hasattr(raw, "__getitem__"):
        return Failure(f"wrong type: {type(raw).__name__}, wanted a list of {count}")
    try:
        items = list(raw)
    except Exception as error:
        return Failure(f"wrong type: {type(raw).__name__} cannot be read as a list ({error})")
    if len(items) != count:
        return Failure(f"wrong length: {len(items)} values for {count} completions")
    return [read_part(item) for item in items]


class Combiner:
    """Calls the functions on requests. `timeout_s` ends a waiting (async) function by itself; only the pool can end a
    blocking one."""

    def __init__(self, functions: Sequence[RewardFunction], on_error: OnError, timeout_s: float) -> None:
        self.weights = {function.name: function.weight for function in functions}
        # Async ones first: they begin to wait before a blocking one takes the loop.
        self._functions = sorted(functions, key=lambda function: not function.asynchronous)
        self._on_error = on_error
        self._timeout_s = timeout_s
        self.asynchronous = all(function.asynchronous for function in functions)
        self.waiting = {function.name for function in functions if function.asynchronous}
        """Functions that wait: by their signature, or because a call of theirs gave what is to be waited for."""

    async def score(self, requests: Sequence[RewardRequest]) -> tuple[list[Score], int]:
        """One score for each request, in order, and how many parts were ended by their limit."""
        if self.waiting:
            columns = await asyncio.gather(*(self._parts(function, requests) for function in self._functions))
        else:
            columns = [await self._parts(function, requests) for function in self._functions]
        named = dict(zip((function.name for function in self._functions), columns, strict=True))
        ordered = {name: named[name] for name in self.weights}
        scores = [
            combine({name: parts[row] for name, parts in ordered.items()}, self.weights, self._on_error)
            for row in range(len(requests))
        ]
        timeouts = sum(isinstance(part, Failure) and part.timed_out for parts in columns for part in parts)
        return scores, timeouts

    async def _parts(self, function: RewardFunction, requests: Sequence[RewardRequest]) -> list[Part]:
        """[requests] one function's parts.

        Group functions get one call. Per-sample functions in TRL shape get one too; if it fails, each request is
        called alone, so that a bad sample does not take its neighbours with it. Async per-sample functions are
        called once a request, all at the same time.
        """
        if function.unit == "group" or (function.shape == "trl" and not function.asynchronous and len(requests) > 1):
            outcome = await self._guarded(function, function.call_many, requests)
            parts = outcome if isinstance(outcome, Failure) else read_list(outcome, len(requests))
            if not isinstance(parts, Failure):
                return parts
            if function.unit == "group":
                return [parts] * len(requests)
        parts = []
        for place, request in enumerate(requests):
            if function.name in self.waiting:
                return parts + await asyncio.gather(*(self._one(function, one) for one in requests[place:]))
            parts.append(await self._one(function, request))
        return parts

    async def _one(self, function: RewardFunction, request: RewardRequest) -> Part:
        outcome = await self._guarded(function, function.call_one, request)
        if isinstance(outcome, Failure):
            return outcome
        if function.shape != "trl":
            return read_part(outcome)
        parts = read_list(outcome, 1)
        return parts if isinstance(parts, Failure) else parts[0]

    async def _guarded(self, function: RewardFunction, call: Any, argument: Any) -> Any:
        """The call's value, or a Failure for anything that it raises (exit calls included) or a limit that it passes."""
        limit = None
        try:
            value = call(argument)
            if isinstance(value, (float, int, list)) or not inspect.isawaitable(value):
                return value
            self.waiting.add(function.name)
            async with asyncio.timeout(self._timeout_s) as limit:
                return await value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Failure(f"{type(error).__name__} raised by the function")
        except TimeoutError as error:
            if limit is not None and limit.expired():
                return Failure(f"no answer after {self._timeout_s:g} s", timed_out=True)
            return Failure(f"TimeoutError: {error}")
        except (Exception, SystemExit) as error:
            return Failure(f"{type(error).__name__}: {error}")
