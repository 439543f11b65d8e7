"""A source's tasks in another order: those whose answers are likely to be about as long come together, bucket by bucket.

A batch waits for its longest answer; when all are about as long, nobody waits for long. The price is order: a window of several
batches is drawn, sorted by predicted length, cut into batches, and these are given in shuffled order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from headrace.protocols import TaskSource
from headrace.types import Group, Task, Unit

WINDOW = 8
"""Batches that are sorted together."""


class LengthBuckets:
    """A `TaskSource` over another. A task that was answered before is predicted by its answers' mean length; any other by the
    length of its prompt, in the proportion seen so far."""

    def __init__(self, source: TaskSource, batch: int, seed: int) -> None:
        self.source, self.batch, self.seed = source, batch, seed
        self._lengths: dict[str, float] = {}
        """Prompt -> mean tokens of its last group's answers."""
        self._answered = self._asked = 1.0
        self._pending: deque[Task] = deque()
        self._window = 0
        self._order: list[int] = []
        self._before: dict[str, Any] = source.state()
        """The source's state before the window that is being given out."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def next(self) -> Task | None:
        if not self._pending:
            self._draw(None)
        return self._pending.popleft() if self._pending else None

    def _draw(self, order: list[int] | None) -> None:
        """Draw a window and put it in order, or in the order that it had before."""
        self._before = self.source.state()
        tasks: list[Task] = []
        while len(tasks) < WINDOW * self.batch and (task := self.source.next()) is not None:
            tasks.append(task)
        self._order = self._buckets(tasks) if order is None else order
        self._window += 1
        self._pending.extend(tasks[index] for index in self._order)

    def _buckets(self, tasks: list[Task]) -> list[int]:
        by_length = sorted(range(len(tasks)), key=lambda index: (self.predict(tasks[index]), index))
        buckets = [by_length[start : start + self.batch] for start in range(0, len(tasks), self.batch)]
        shuffled = np.random.default_rng([self.seed, self._window]).permutation(len(buckets))
        return [index for number in shuffled for index in buckets[number]]

    def predict(self, task: Task) -> float:
        """Tokens of an answer."""
        known = self._lengths.get(prompt_key(task))
        return known if known is not None else prompt_length(task) * self._answered / self._asked

    def observe(self, unit: Unit) -> None:
        """Learn from a finished unit."""
        if isinstance(unit, Group) and unit.episodes:
            mean = sum(episode.completion_length for episode in unit.episodes) / len(unit.episodes)
            self._lengths[prompt_key(unit.task)] = mean
            self._answered += mean
            self._asked += prompt_length(unit.task)

    def give_back(self, task: Task, reason: str) -> None:
        self.source.give_back(task, reason)

    def state(self) -> dict[str, Any]:
        """Where the window began, and what of it was given: a restored run gives the rest in the same order."""
        given = len(self._order) - len(self._pending)
        return {"source": self._before, "window": self._window, "order": self._order, "given": given}

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state["source"])
        self._pending.clear()
        self._window = max(0, int(state["window"]) - 1)
        self._draw([int(index) for index in state["order"]] if state["window"] else None)
        for _ in range(int(state["given"])):
            self._pending.popleft()


def prompt_key(task: Task) -> str:
    """The same in every epoch."""
    return task.task_id.partition("#")[0]


def prompt_length(task: Task) -> float:
    """Characters; those of a chat are all its messages'."""
    prompt = task.payload.get("prompt", "")
    if isinstance(prompt, str):
        return float(max(1, len(prompt)))
    return float(max(1, sum(len(str(message.get("content", ""))) for message in prompt)))
