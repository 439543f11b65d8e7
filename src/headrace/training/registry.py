"""Turns a name, or the import path of a user's own function, into the function that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.imports import import_object, is_import_path


def resolve(name: str, known: Mapping[str, Callable[..., Any]], key: str) -> Callable[..., Any]:
    """The function called `name` in `known`, or `pkg.module:fn` or `file.py:fn` that the user's config gives at `key`."""
    if name in known:
        return known[name]
    if not is_import_path(name):
        valid = f"{', '.join(known)}, `pkg.module:function` or `file.py:function`"
        raise ConfigError(key, f"found {name!r}; valid: {valid}")
    found = import_object(name, Path.cwd(), key)
    if not callable(found):
        raise ConfigError(key, f"{name!r} is a {type(found).__name__}, not a function")
    return found
