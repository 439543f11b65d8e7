"""Turns a model's name or path into a folder that is known to hold a causal language model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError

if TYPE_CHECKING:
    from headrace.config import ModelConfig

Progress = Callable[[str], None]

BUILT_IN = ("smollm2", "tiny")


def _silent(line: str) -> None:
    pass


def resolve_model(config: ModelConfig, *, seed: int = 0, progress: Progress = _silent) -> Path:
    """The folder of the policy at the start. Built-in names win over folders of the same name (write `./tiny`).

    `seed` decides the built-in `tiny` alone. Built-in models are made once, cached, and hashed at each use. `progress`
    gets lines for people. Raises ModelError (one line, with the remedy).
    """
    match config.path:
        case "smollm2":
            from headrace.models.smollm2 import smollm2_folder

            return smollm2_folder(progress)
        case "tiny":
            from headrace.models.tiny import tiny_folder

            return tiny_folder(seed, progress)
        case "":
            raise ModelError(f"model.path: no model is named: give a folder, or one of {', '.join(BUILT_IN)}")
    folder = Path(config.path).expanduser()
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raise ModelError unless the folder has a readable config.json and all of its weight files."""
    if not folder.is_dir():
        raise ModelError(f"model.path: {str(folder)!r} is no folder; built in are {', '.join(BUILT_IN)}")
    _read_json(folder / "config.json", folder)
    index = next((name for name in _INDEXES if (folder / name).is_file()), None)
    if index:
        shards = sorted(set(_read_json(folder / index, folder).get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing or not shards:
            raise ModelError(
                f"model.path: {folder} lacks the weights {', '.join(missing) or 'that ' + index + ' names'}"
            )
    elif not any((folder / name).is_file() for name in _SINGLE):
        raise ModelError(f"model.path: {folder} holds no weights: expected {' or '.join(_SINGLE)}")


_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model.path: {folder} holds no {path.name}: it is no Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"model.path: {path} holds a {type(found).__name__}, expected an object")
    return found


def load_tokenizer(folder: Path | str) -> Any:
    """The folder's tokenizer, with a pad token. Raises ModelError when there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own for one bad file
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model.path: {folder} has no tokenizer that can be read: {line}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
