"""Turns a builder into a cached folder that exists whole or not at all, and is hashed at each use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ModelError

MANIFEST = "headrace-manifest.json"


def cache_root() -> Path:
    """Where built models are kept: $XDG_CACHE_HOME/headrace/models, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "headrace" / "models"


def cached_folder(name: str, build: Callable[[Path], None], *, on_wait: Callable[[], None] = lambda: None) -> Path:
    """``cache_root() / name``, verified; made by ``build(empty folder)`` when it is not there.

    Processes that ask at the same time wait for the one that builds. A build that dies leaves nothing that is used.
    """
    root = cache_root()
    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock", on_wait):
            if not folder.exists():
                _build(folder, build)
    except OSError as error:
        raise ModelError(
            f"the model cache {root} cannot be used: {error}; set XDG_CACHE_HOME to another place"
        ) from error
    verify(folder)
    return folder


def verify(folder: Path) -> None:
    """Raise ModelError, naming the file and the remedy, unless every file has the bytes it was built with."""
    remedy = f"delete the folder and run again to rebuild it: rm -r '{folder}'"
    files = _read_manifest(folder / MANIFEST)
    present = {path.name for path in folder.iterdir() if path.name != MANIFEST}
    if files is None or not present <= files.keys():
        raise ModelError(f"{MANIFEST} in the cached model {folder} is missing or damaged; {remedy}")
    for name, expected in files.items():
        try:
            found = sha256_of(folder / name)
        except OSError:
            raise ModelError(f"{name} is missing from the cached model {folder}; {remedy}") from None
        if found != expected:
            raise ModelError(
                f"{name} in the cached model {folder} is damaged (sha256 {found[:12]}…, expected {expected[:12]}…); {remedy}"
            )


def _read_manifest(path: Path) -> dict[str, str] | None:
    """File name -> hash, or None for a manifest that cannot be one."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = isinstance(files, dict) and all(isinstance(found, str) for found in files.values())
    return files if whole else None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        build(partial)
        write_manifest(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_manifest(folder: Path) -> None:
    """Record the hash of every file in the folder, and bring all of it to the disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    manifest = {"sha256": {path.name: sha256_of(path) for path in files}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*files, folder / MANIFEST]:
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Held by one process at a time; the system releases it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
