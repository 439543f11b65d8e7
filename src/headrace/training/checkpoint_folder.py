"""Turns a trainer's state into a plain Hugging Face folder with a manifest, written whole or not at all, and back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.errors import RunDirError

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
TRAINER = "trainer.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_companions(source: Path, target: Path, leave: tuple[str, ...] = ()) -> None:
    """Tokenizer, chat template and generation config: the small files beside the weights that are not written anew."""
    for path in sorted(source.iterdir()):
        own = path.name in (MANIFEST, TRAINER, *leave) or path.name.endswith(".index.json")
        if path.is_file() and not own and not path.name.endswith(WEIGHT_SUFFIXES) and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def write_folder(folder: str, fill: Callable[[Path], None]) -> None:
    """`fill` a temporary folder beside `folder`, add the manifest, force it to disk, rename it into place."""
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.writing-{os.getpid()}")
    for leftover in target.parent.glob(f".{target.name}.writing-*"):  # of a writer that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
        files = sorted(path for path in temporary.iterdir() if path.is_file())
        manifest = {path.name: {"sha256": file_hash(path), "bytes": path.stat().st_size} for path in files}
        (temporary / MANIFEST).write_text(json.dumps({"files": manifest}, indent=1))
        for path in [*files, temporary / MANIFEST]:
            _sync(path)
        _sync(temporary)
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def verify_folder(folder: str) -> dict[str, Any]:
    """The manifest's files, each found with the size and hash it names; a RunDirError says which is not."""
    root = Path(folder)
    try:
        manifest = json.loads((root / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        raise RunDirError(f"{root / MANIFEST} is missing: this is no finished checkpoint; use an earlier one") from None
    except (ValueError, KeyError, TypeError):
        raise RunDirError(f"{root / MANIFEST} is damaged: use an earlier checkpoint") from None
    for name, facts in manifest.items():
        path = root / name
        if Path(name).name != name or not path.is_file():
            raise RunDirError(f"{path} is missing: use an earlier checkpoint")
        if path.stat().st_size != facts["bytes"] or file_hash(path) != facts["sha256"]:
            raise RunDirError(f"{path} is damaged (its bytes are not those written): use an earlier checkpoint")
    return manifest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
