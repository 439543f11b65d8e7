"""Turns pairs and triples of numbers into the built-in tasks `sums` and `largest`, each with a held-out part.

Whether a problem is held out depends on its numbers without their order, and on no seed: no training problem is a
held-out one with its numbers swapped, in any run.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np

from headrace.errors import DataError
from headrace.rollout.sources.rows import Payload, Rows

Numbers = tuple[int, ...]

EXAMPLE = (27, 41)
"""The solved sum in the one-shot prompt; it is in neither part."""

HELDOUT_SHARE = 10
"""One problem in so many is held out."""

SMALLEST_SUM, LARGEST_SUM = 40, 198
"""Of the bounds that leave problems in both parts, and of all pairs."""

LARGEST_PROBLEMS = 4000
LARGEST_PREFILL = "The largest number is"


def is_heldout(*numbers: int) -> bool:
    """The same for every order of the numbers."""
    key = ",".join(map(str, sorted(numbers)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELDOUT_SHARE == 0


@cache
def sums_problems(*, heldout: bool) -> tuple[Numbers, ...]:
    """All ordered pairs of two-digit numbers of one part, in a fixed mixed order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if sorted((a, b)) != sorted(EXAMPLE)]
    part = [pair for pair in pairs if is_heldout(*pair) == heldout]
    return tuple(part[i] for i in np.random.default_rng(0).permutation(len(part)))


@cache
def largest_problems(*, heldout: bool) -> tuple[Numbers, ...]:
    """Triples of different two-digit numbers of one part, no two of them permutations of each other."""
    draw, chosen = np.random.default_rng(1), {}
    while len(chosen) < LARGEST_PROBLEMS:
        numbers = tuple(int(n) for n in draw.integers(10, 100, size=3))
        if len(set(numbers)) == 3:
            chosen.setdefault(tuple(sorted(numbers)), numbers)
    return tuple(numbers for numbers in chosen.values() if is_heldout(*numbers) == heldout)


def _sum_one_shot(numbers: Numbers) -> Payload:
    (a, b), (x, y) = numbers, EXAMPLE
    return {"prompt": f"{x} + {y} = {x + y}\n{a} + {b} =", "answer": str(a + b), "a": a, "b": b}


def _sum_plain(numbers: Numbers) -> Payload:
    a, b = numbers
    return {"prompt": f"{a}+{b}=", "answer": str(a + b), "a": a, "b": b}


def _largest(numbers: Numbers) -> Payload:
    a, b, c = numbers
    question = f"Which number is the largest: {a}, {b} or {c}?"
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "prefill": LARGEST_PREFILL, "answer": str(max(numbers)), "numbers": list(numbers)}


SUMS_STYLES = {"one_shot": _sum_one_shot, "plain": _sum_plain}


def sums(options: dict[str, object], *, heldout: bool) -> Rows:
    """Two-digit addition. Options: `style`, one_shot (text for a language model) or plain (`27+41=`); `max_sum`, the
    largest result (99: two digits)."""
    _only(options, "sums", ("style", "max_sum"))
    style, most = options.get("style", "one_shot"), options.get("max_sum", LARGEST_SUM)
    if style not in SUMS_STYLES:
        raise DataError(f"tasks.options.style: {style!r} is not one of {', '.join(SUMS_STYLES)}")
    if type(most) is not int or not SMALLEST_SUM <= most <= LARGEST_SUM:
        raise DataError(f"tasks.options.max_sum: {most!r} is no number from {SMALLEST_SUM} to {LARGEST_SUM}")
    problems = tuple(pair for pair in sums_problems(heldout=heldout) if sum(pair) <= most)
    return _rows("sums", style if most == LARGEST_SUM else f"{style}-{most}", problems, SUMS_STYLES[style], heldout)


def largest(options: dict[str, object], *, heldout: bool) -> Rows:
    """The largest of three two-digit numbers, as chat with the start of the answer given."""
    _only(options, "largest", ())
    return _rows("largest", "chat", largest_problems(heldout=heldout), _largest, heldout)


def _rows(name: str, style: str, problems: tuple[Numbers, ...], render, heldout: bool) -> Rows:
    def get(index: int) -> tuple[str, Payload]:
        return "+".join(map(str, problems[index])), render(problems[index])

    part = "heldout" if heldout else "train"
    source = f"{name}-heldout" if heldout else name
    return Rows(name=source, length=len(problems), get=get, fingerprint=f"{name}/{style}/{part}/{len(problems)}")


def _only(options: dict[str, object], source: str, valid: tuple[str, ...]) -> None:
    unknown = [key for key in options if key not in valid]
    if unknown:
        known = ", ".join(valid) or "none"
        raise DataError(f"tasks.options.{unknown[0]}: not an option of {source}; valid: {known}")
