"""Reward functions as users write them, good and bad; the tests name them by this file's path."""

import asyncio
import os
import signal
import time


def by_length(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]


def plain(completions, answer):
    return [float(completion == wanted) for completion, wanted in zip(completions, answer, strict=True)]


def scaled(completions, scale=1.0, **columns):
    return [scale] * len(completions)


def chat_roles(prompts, completions, **columns):
    return [
        float(c[0]["role"] == "assistant" and c[0]["content"] == p[-1]["content"])
        for p, c in zip(prompts, completions, strict=True)
    ]


async def waits(prompts, completions, **columns):
    await asyncio.sleep(0.2)
    return [float(completion) for completion in completions]


async def waits_for_ever(prompts, completions, **columns):
    if "hang" in completions:
        await asyncio.Event().wait()
    return [1.0] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": data_source}


def compute_score_short(solution_str, ground_truth, method="strict"):
    return 1.0 if solution_str == ground_truth else 0.0


async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return float(solution_str == ground_truth)


def centred(prompts, completions, **columns):
    mean = sum(map(float, completions)) / len(completions)
    return [float(completion) - mean for completion in completions]


def group_size(prompts, completions, **columns):
    return [len(completions)] * len(completions)


def nothing(prompts, completions, **columns):
    return [None] * len(completions)


def what_it_says(completions, **columns):
    """Does to each sample, and so to the call it is in, what the completion asks for."""
    scores = []
    for completion in completions:
        if completion == "raise":
            raise ValueError("asked to")
        if completion == "exit":
            raise SystemExit(3)
        if completion == "hang":
            while True:
                pass
        if completion == "sleep":
            time.sleep(600)
        if completion == "short":
            return [1.0] * (len(completions) - 1)
        if completion == "text":
            return "1.0"
        if completion == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "slow":
            time.sleep(0.3)
        item = {"none": None, "nan": float("nan"), "inf": float("inf"), "string": "1.0", "list": [1.0]}
        scores.append(item.get(completion, 1.0))
    return scores


def needs_a_column(completions, rubric):
    return [1.0] * len(completions)


def no_shape(text):
    return 1.0


def positional(completions, /):
    return [1.0]


def verl_with_more(solution_str, ground_truth, judge):
    return 1.0


class Marker:
    def __call__(self, completions, **columns):
        return [2.0] * len(completions)


marker = Marker()
not_callable = 3


_asked = 0


def asks(data_source, solution_str, ground_truth, extra_info=None):
    """Waits, and its signature does not say so. How many are asked at once."""
    return _ask()


async def _ask():
    global _asked
    _asked += 1
    await asyncio.sleep(0.02)
    found = float(_asked)
    await asyncio.sleep(0.02)
    _asked -= 1
    return found
