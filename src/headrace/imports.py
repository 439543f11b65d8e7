"""Turns `pkg.module:name` and `file.py:name` of a user's config into the object that they name.

User code is imported only from what the user's own config names.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


def is_import_path(use: str) -> bool:
    """Whether the text has a place and a name in it, as in `pkg.module:name`."""
    location, separator, attribute = use.rpartition(":")
    return bool(separator and location and attribute)


def import_object(use: str, base_folder: Path, path: str) -> Any:
    """The object that `use` names; `path` is the config key it stands at, for the error."""
    location, _, attribute = use.rpartition(":")
    module = _import_file(base_folder / location, path) if location.endswith(".py") else _import(location, path)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
            raise ConfigError(path, f"{location!r} has no {attribute!r}; its functions: {', '.join(names) or 'none'}")
        found = getattr(found, part)
    return found


def _import(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and (error.name or "") == name.split(".")[0]:
            hint = f"; a file beside the config is named with its suffix: '{name.replace('.', '/')}.py:function'"
        raise ConfigError(path, f"importing {name!r} failed: {type(error).__name__}: {error}{hint}") from error


def _import_file(file: Path, path: str) -> Any:
    if not file.is_file():
        raise ConfigError(path, f"no such file: {file}")
    name = f"headrace_user_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader, "a .py suffix always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(path, f"importing {file} failed: {type(error).__name__}: {error}") from error
    return module
