"""Turns a procedural task of the package `reasoning_gym` into rows, with what its own verifier needs."""

from __future__ import annotations

import importlib.util
import json
import logging
from difflib import get_close_matches
from typing import Any

from headrace.errors import DataError, MissingExtra
from headrace.rollout.sources.rows import Payload, Rows

log = logging.getLogger(__name__)

SIZE = 2000
HELDOUT_SIZE = 200
HELDOUT_SEED_OFFSET = 1_000_003


def reasoning_gym_rows(task: str, options: dict[str, Any], *, heldout: bool) -> Rows:
    """The task's problems. Options go to its dataset (`size`, 2,000 by default, `seed`, and the task's own).

    The column `reasoning_gym` is what `reasoning_gym.get_score_answer_fn(dataset)(answer, entry)` takes. The held-out
    part comes from another seed and leaves out every question that the training part asks.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtra("reasoning_gym", "reasoning-gym", f"tasks.source = 'reasoning_gym:{task}'")
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = get_close_matches(task, DATASETS, n=3, cutoff=0.5)
        guess = f"; close: {', '.join(close)}" if close else f"; there are {len(DATASETS)}, such as chain_sum and gcd"
        raise DataError(f"tasks.source: reasoning_gym has no task {task!r}{guess}")
    options = {"size": SIZE, "seed": 0, **options}
    training = _dataset(task, options)
    if not heldout:
        return _rows(task, training, range(len(training)), options, task)
    seen = {entry["question"] for entry in training}
    other = {**options, "seed": int(options["seed"]) + HELDOUT_SEED_OFFSET, "size": HELDOUT_SIZE * 2}
    candidates = _dataset(task, other)
    unseen: dict[str, int] = {}
    for index, entry in enumerate(candidates):
        if entry["question"] not in seen:
            unseen.setdefault(entry["question"], index)
    if not unseen:
        raise DataError(
            f"reasoning_gym:{task} has no problem left that training does not show: "
            f"lower tasks.options.size (now {options['size']}) or make the task harder"
        )
    return _rows(task, candidates, list(unseen.values())[:HELDOUT_SIZE], other, f"{task}-heldout")


def _dataset(task: str, options: dict[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"tasks.options: reasoning_gym:{task} refuses {options}: {error}") from error


def _rows(task: str, dataset: Any, indices: Any, options: dict[str, Any], name: str) -> Rows:
    def get(position: int) -> tuple[str, Payload]:
        index = indices[position]
        entry = dataset[index]
        payload = {
            "prompt": entry["question"],
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "reasoning_gym": {"dataset": task, "entry": _through_json(entry)},
        }
        return str(index), payload

    fingerprint = f"reasoning_gym/{json.dumps(options, sort_keys=True)}"
    notes = _verifier_notes(task, dataset)
    for note in notes:
        log.warning(note)
    return Rows(name=name, length=len(indices), get=get, fingerprint=fingerprint, notes=notes)


def _verifier_notes(task: str, dataset: Any) -> tuple[str, ...]:
    """Says so when the task's verifier needs what JSON cannot carry (a few compare nested tuples)."""
    entry = dataset[0]
    if entry["answer"] is None:
        return ()
    answer, plain = str(entry["answer"]), _through_json(entry)
    try:
        same = dataset.score_answer(answer, plain) == dataset.score_answer(answer, entry)
    except Exception:
        same = False
    return () if same else (f"reasoning_gym:{task}: its verifier does not work on stored entries; score it yourself",)


def _through_json(entry: Any) -> dict[str, Any]:
    return json.loads(json.dumps(entry, default=_plain))


def _plain(value: Any) -> Any:
    """What JSON has no form for: numpy numbers as numbers, sets as lists, the rest as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
