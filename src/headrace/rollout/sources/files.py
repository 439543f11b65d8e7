"""Turns a JSONL file or a saved Hugging Face dataset into rows."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

from headrace.errors import DataError, MissingExtra
from headrace.rollout.sources.rows import Payload, Rows, row_payload

log = logging.getLogger(__name__)


def jsonl_rows(path: Path, prompt_column: str) -> Rows:
    """One JSON object a line. Every line is checked now, so that a bad one does not stop a run hours later.

    Empty lines are skipped and counted in `notes`; row ids are line numbers, so they survive such lines.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"tasks.source: {path} cannot be read: {error.strerror or error}") from error
    lines: list[tuple[int, bytes]] = []
    empty = 0
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        if not line.strip():
            empty += 1
            continue
        row_payload(_parse(line, path, number), prompt_column, f"{path}:{number}")
        lines.append((number, line))
    if not lines:
        found = f"its {empty} lines are empty" if empty else "the file is empty"
        raise DataError(f"tasks.source: {path} holds no tasks ({found}): give it one JSON object a line")
    notes = (f"{path}: {empty} empty {'line was' if empty == 1 else 'lines were'} skipped",) if empty else ()
    for note in notes:
        log.warning(note)

    def get(index: int) -> tuple[str, Payload]:
        number, line = lines[index]
        return str(number), row_payload(_parse(line, path, number), prompt_column, f"{path}:{number}")

    fingerprint = hashlib.sha256(data).hexdigest()[:16]
    return Rows(name=path.stem, length=len(lines), get=get, fingerprint=fingerprint, notes=notes)


def _parse(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        problem = getattr(error, "msg", None) or str(error)
        raise DataError(
            f"{path}:{number}: not valid JSON ({problem}): {line[:60].decode(errors='replace')!r}"
        ) from error


def dataset_rows(folder: Path, prompt_column: str, options: dict[str, Any]) -> Rows:
    """A folder written by `Dataset.save_to_disk`. Option `split` picks one of a DatasetDict (`train` by default)."""
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtra("datasets", "datasets", f"tasks.source = 'hf:{folder}'")
    import datasets

    unknown = [key for key in options if key != "split"]
    if unknown:
        raise DataError(f"tasks.options.{unknown[0]}: not an option of hf:FOLDER; valid: split")
    try:
        table = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise DataError(f"tasks.source: {folder} is no folder that Dataset.save_to_disk has written") from error
    if isinstance(table, datasets.DatasetDict):
        split = str(options.get("split", "train"))
        if split not in table:
            raise DataError(f"tasks.options.split: {folder} has no split {split!r}; splits found: {', '.join(table)}")
        table = table[split]
    if prompt_column not in table.column_names:
        columns = ", ".join(table.column_names) or "none"
        raise DataError(f"{folder}: no column {prompt_column!r} (tasks.prompt_column); columns found: {columns}")

    def get(index: int) -> tuple[str, Payload]:
        return str(index), row_payload(table[index], prompt_column, f"{folder} row {index}")

    return Rows(name=folder.name, length=len(table), get=get, fingerprint=f"{table._fingerprint}/{len(table)}")
