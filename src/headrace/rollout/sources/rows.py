"""Turns a table of rows into an endless or finite, shuffled, restorable stream of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import DataError
from headrace.types import Task

Payload = dict[str, Any]

MESSAGE_KEYS = ("role", "content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table that can be read at any row.

    get: row index -> (row id, payload); the id is the same in every run
    fingerprint: changes when the rows do, so that a restored position is never applied to other data
    notes: what a user should know of how the table was read
    """

    name: str
    length: int
    get: Callable[[int], tuple[str, Payload]]
    fingerprint: str
    notes: tuple[str, ...] = ()


def check_prompt(prompt: Any, where: str) -> None:
    """Raise DataError unless the prompt is a non-empty string or a non-empty list of chat messages."""
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: the prompt is an empty string")
        return
    if not isinstance(prompt, Sequence):
        found = type(prompt).__name__
        raise DataError(f"{where}: the prompt must be a string or a list of chat messages, found {found}")
    if not prompt:
        raise DataError(f"{where}: the prompt is an empty list of messages")
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or any(key not in message for key in MESSAGE_KEYS):
            raise DataError(
                f"{where}: message {index} must be a table with 'role' and 'content', found {message!r:.80}"
            )


def row_payload(row: Any, prompt_column: str, where: str) -> Payload:
    """The row's columns with the prompt under the key "prompt"."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with a {prompt_column!r} column, found {type(row).__name__}")
    if prompt_column not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}: no column {prompt_column!r} (tasks.prompt_column); columns found: {columns}")
    check_prompt(row[prompt_column], where)
    columns = {str(key): value for key, value in row.items() if key not in ("prompt", prompt_column)}
    return {"prompt": row[prompt_column], **columns}


class RowSource:
    """Tasks from `Rows`: each epoch is one pass, shuffled by (seed, epoch) alone.

    Task ids are ``source:row#epoch``: stable from run to run, and no id is given twice.
    """

    def __init__(self, rows: Rows, *, seed: int, shuffle: bool, epochs: int = 0, limit: int = 0) -> None:
        if rows.length == 0:
            raise DataError(f"{rows.name}: there are no tasks in it")
        self.rows = rows
        self.notes = rows.notes
        self.given_back: Counter[str] = Counter()
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._count = min(rows.length, limit) if limit else rows.length
        self._epoch = self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Tasks in one epoch."""
        return self._count

    def next(self) -> Task | None:
        if self._position == self._count:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        if self._epochs and self._epoch >= self._epochs:
            return None
        row_id, payload = self.rows.get(int(self._order[self._position]))
        self._position += 1
        return Task(task_id=f"{self.rows.name}:{row_id}#{self._epoch}", source=self.rows.name, payload=payload)

    def give_back(self, task: Task, reason: str) -> None:
        """Only counted: a table has every task in it still."""
        self.given_back[reason] += 1

    def state(self) -> dict[str, Any]:
        return {
            "source": self.rows.name,
            "fingerprint": self.rows.fingerprint,
            "count": self._count,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for key, found in (("fingerprint", self.rows.fingerprint), ("count", self._count)):
            if state[key] != found:
                raise DataError(
                    f"{self.rows.name}: the tasks are not those of the checkpoint ({key} {found}, then {state[key]}): "
                    "restore the data, or start a new run"
                )
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._count)
        return np.random.default_rng([self._seed, epoch]).permutation(self._count)
