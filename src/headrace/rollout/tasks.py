"""Turns the [tasks] table into a source of tasks, and into its held-out part for evaluation."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from headrace.errors import DataError
from headrace.protocols import TaskSource
from headrace.rollout.config import TasksConfig
from headrace.rollout.sources.rows import Rows, RowSource

BUILT_IN = ("sums", "largest")
CLIENTS = "clients"
KINDS = (
    "sums",
    "largest",
    "jsonl:PATH",
    "hf:FOLDER",
    "reasoning_gym:TASK",
    "pkg.module:object",
    "file.py:object",
    CLIENTS,
)


def open_source(config: TasksConfig, *, seed: int, folder: Path) -> TaskSource:
    """The training tasks. Relative paths start at `folder`, the one that holds the config.

    Raises DataError (one line) for a source that cannot be read, and MissingExtra for an optional package.
    """
    if config.source == CLIENTS:
        from headrace.rollout.sources.trajectories import TrajectorySource

        return TrajectorySource(CLIENTS, "task")
    rows = _open_rows(config, folder, heldout=False)
    if rows is None:
        from headrace.rollout.sources.objects import open_object

        return open_object(config, seed=seed, folder=folder)
    return RowSource(rows, seed=seed, shuffle=config.shuffle, epochs=config.epochs, limit=config.limit)


def heldout_source(config: TasksConfig, *, folder: Path, limit: int = 0) -> TaskSource:
    """One pass, in an order that never changes, over problems that no training task of this source shows.

    Only sources that make their own problems have such a part: `sums`, `largest` and `reasoning_gym:TASK`.
    """
    kind = config.source.partition(":")[0]
    if kind not in (*BUILT_IN, "reasoning_gym"):
        raise DataError(
            f"tasks.source = {config.source!r} has no held-out part of its own: "
            "name the tasks to evaluate on, for example evaluation.source = 'jsonl:heldout.jsonl'"
        )
    rows = _open_rows(config, folder, heldout=True)
    assert rows is not None
    return RowSource(rows, seed=0, shuffle=False, epochs=1, limit=limit)


def _open_rows(config: TasksConfig, folder: Path, *, heldout: bool) -> Rows | None:
    """The source's table, or None when it is an object of the user's."""
    kind, colon, rest = config.source.partition(":")
    options = dict(config.options)
    match kind:
        case "sums" | "largest" if not colon:
            from headrace.rollout.sources import arithmetic

            return getattr(arithmetic, kind)(options, heldout=heldout)
        case "jsonl":
            from headrace.rollout.sources.files import jsonl_rows

            return jsonl_rows(folder / Path(rest).expanduser(), config.prompt_column)
        case "hf":
            from headrace.rollout.sources.files import dataset_rows

            return dataset_rows(folder / Path(rest).expanduser(), config.prompt_column, options)
        case "reasoning_gym":
            from headrace.rollout.sources.gym import reasoning_gym_rows

            return reasoning_gym_rows(rest, options, heldout=heldout)
    if not colon:
        raise DataError(_unknown_source(config.source))
    return None


def _unknown_source(source: str) -> str:
    found = f"{source!r} is no source of tasks" if source else "no source of tasks is named"
    close = get_close_matches(source, BUILT_IN, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return f"tasks.source: {found}{guess}; valid: {', '.join(KINDS)}"
