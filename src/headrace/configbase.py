"""The base of every config struct: frozen, keyword-only, and strict about unknown keys."""

from __future__ import annotations

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file. The docstring of a field is the string after it; the config reference is made of them."""
