"""Turns an object of the user's (source, iterable, sequence or factory of one) into a source of tasks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import DataError
from headrace.protocols import TaskSource
from headrace.rollout.config import TasksConfig
from headrace.rollout.sources.rows import Rows, RowSource, check_prompt, row_payload
from headrace.types import Task

log = logging.getLogger(__name__)


def open_object(config: TasksConfig, *, seed: int, folder: Path) -> TaskSource:
    """The source named by ``pkg.module:object`` or ``file.py:object``.

    A class or function is called first, with `tasks.options` as keyword arguments, and `seed` if it takes one. The
    result may be a list of rows (shuffled, repeated and limited as a file is), an iterable of rows, or an object with
    ``next()``. A row is a Task, a dict with the prompt column, or a bare prompt.
    """
    found = _call_factory(_import(config.source, folder), config, seed)
    if hasattr(found, "next"):
        return ObjectSource(found, config)
    if isinstance(found, Mapping | str) or not (hasattr(found, "__iter__") or _is_table(found)):
        raise DataError(
            f"tasks.source: {config.source} is a {type(found).__name__}: expected an iterable of tasks, "
            "an object with next(), or a function that returns one"
        )
    if _is_table(found):
        return _table(found, config, seed)
    return ObjectSource(_Repeated(found, config.epochs), config)


def _import(source: str, folder: Path) -> Any:
    place, _, name = source.rpartition(":")
    if not name:
        raise DataError(f"tasks.source: {source!r} names no object: write {place}:NAME")
    try:
        module = (
            _load_file(folder / Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
        )
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except AttributeError as error:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise DataError(f"tasks.source: {place} has no {name!r}; it has: {', '.join(public) or 'nothing'}") from error
    except ModuleNotFoundError as error:
        hint = "install it, or name a file beside the config: file.py:object"
        raise DataError(
            f"tasks.source: {source!r} cannot be imported: no module named {error.name!r}; {hint}"
        ) from error
    except Exception as error:
        raise DataError(f"tasks.source: importing {place} failed: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"tasks.source: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"headrace_user_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look a class's module up by name
    spec.loader.exec_module(module)
    return module


def _call_factory(found: Any, config: TasksConfig, seed: int) -> Any:
    """Classes have `next` and `__iter__` as attributes too, so they are told apart from objects first."""
    if not inspect.isclass(found) and (hasattr(found, "next") or hasattr(found, "__iter__") or not callable(found)):
        if config.options:
            raise DataError(f"tasks.options: {config.source} is no function or class that could take them")
        return found
    options: dict[str, Any] = dict(config.options)
    try:
        signature = inspect.signature(found)
    except ValueError:
        signature = None
    if signature and "seed" in signature.parameters:
        options.setdefault("seed", seed)
    try:
        return found(**options)
    except Exception as error:
        raise DataError(f"tasks.source: {config.source}({options}) failed: {type(error).__name__}: {error}") from error


def _is_table(found: Any) -> bool:
    return hasattr(found, "__len__") and hasattr(found, "__getitem__")


def _table(found: Any, config: TasksConfig, seed: int) -> RowSource:
    def get(index: int) -> tuple[str, dict[str, Any]]:
        row = found[index]
        where = f"{config.source}[{index}]"
        if isinstance(row, Task):
            return row.task_id, row.payload
        return str(index), _payload(row, config, where)

    rows = Rows(name=_short(config), length=len(found), get=get, fingerprint=f"{config.source}/{len(found)}")
    return RowSource(rows, seed=seed, shuffle=config.shuffle, epochs=config.epochs, limit=config.limit)


class ObjectSource:
    """Wraps an object with ``next()``. Its own `give_back`, `state` and `restore` are used when it has them.

    Without `state` and `restore` the position is the number of tasks given, and restoring takes so many again: right
    for an object that gives the same tasks each time.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, inner: Any, config: TasksConfig) -> None:
        self.inner = inner
        self.given_back: Counter[str] = Counter()
        self._config = config
        self._given = 0

    def next(self) -> Task | None:
        if self._config.limit and self._given >= self._config.limit:
            return None
        item = self._take()
        if item is None:
            return None
        where = f"{self._config.source} item {self._given}"
        self._given += 1
        if isinstance(item, Task):
            if "prompt" in item.payload:
                check_prompt(item.payload["prompt"], where)
            return item
        task_id = f"{_short(self._config)}:{self._given - 1}"
        return Task(task_id=task_id, source=_short(self._config), payload=_payload(item, self._config, where))

    def give_back(self, task: Task, reason: str) -> None:
        self.given_back[reason] += 1
        if hasattr(self.inner, "give_back"):
            self.inner.give_back(task, reason)

    def state(self) -> dict[str, Any]:
        own = self.inner.state() if hasattr(self.inner, "state") and hasattr(self.inner, "restore") else None
        return {"source": self._config.source, "given": self._given, "own": own}

    def restore(self, state: dict[str, Any]) -> None:
        if state["own"] is not None and hasattr(self.inner, "restore"):
            self.inner.restore(state["own"])
        else:
            log.warning(
                "%s has no state(): taking %d tasks again to find its place", self._config.source, state["given"]
            )
            for _ in range(state["given"] - self._given):
                if self._take() is None:
                    break
        self._given = state["given"]

    def _take(self) -> Any:
        try:
            return self.inner.next()
        except StopIteration:
            return None
        except Exception as error:
            raise DataError(f"tasks.source: {self._config.source} raised {type(error).__name__}: {error}") from error


class _Repeated:
    """``next()`` over an iterable, begun again for each epoch. An epoch without any item ends it."""

    def __init__(self, items: Iterable[Any], epochs: int) -> None:
        self._items, self._epochs = items, epochs
        self._epoch = 0
        self._iterator: Iterator[Any] | None = None
        if hasattr(items, "give_back"):
            self.give_back = items.give_back
        if hasattr(items, "state") and hasattr(items, "restore"):
            self.state, self.restore = items.state, items.restore

    def next(self) -> Any:
        fresh = self._iterator is None
        while True:
            if self._iterator is None:
                if self._epochs and self._epoch >= self._epochs:
                    return None
                self._iterator, fresh = iter(self._items), True
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator, self._epoch = None, self._epoch + 1
                if fresh:
                    return None


def _payload(row: Any, config: TasksConfig, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        row = {config.prompt_column: row}
    return row_payload(row, config.prompt_column, where)


def _short(config: TasksConfig) -> str:
    return config.source.rpartition(":")[2]
