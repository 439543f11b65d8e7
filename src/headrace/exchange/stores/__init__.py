"""Where units wait between rollout and training: one file per medium, opened by name."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.protocols import Store

AVAILABLE = ("memory",)


def open_store(kind: str, max_bytes: int = 0, folder: str = "") -> Store:
    """The store called `kind`; `max_bytes` 0 sets no bound; `folder` is where a store on disk keeps its files."""
    match kind:
        case "memory":
            from headrace.exchange.stores.memory import MemoryStore

            return MemoryStore(max_bytes=max_bytes)
    raise ConfigError("buffer.store", f"{kind!r} is not available; choose one of {', '.join(AVAILABLE)}")
