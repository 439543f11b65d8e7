"""Turns a name, or an import path `package.module:function`, into the function that it stands for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ConfigError


def resolve(name: str, known: Mapping[str, Callable[..., Any]], key: str) -> Callable[..., Any]:
    """The function called `name` in `known`, or imported from the path that the user's config gives at `key`."""
    if name in known:
        return known[name]
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(key, f"{name!r} is not known: use one of {', '.join(known)}, or package.module:function")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as problem:
        raise ConfigError(key, f"cannot import {name!r}: {problem}") from problem
    if not callable(found):
        raise ConfigError(key, f"{name!r} is a {type(found).__name__}, not a function")
    return found
