"""Where units wait between rollout and training: one file per medium, opened by name."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.protocols import Store

AVAILABLE = ("memory", "shared_memory", "files", "redis")
DURABLE = ("files", "redis")
"""Those whose units outlive the process."""


def open_store(
    kind: str,
    max_bytes: int = 0,
    folder: str = "",
    url: str = "redis://127.0.0.1:6379/0",
    *,
    keep_acknowledged: bool = True,
) -> Store:
    """The store called `kind`.

    max_bytes: 0 sets no bound
    folder: where a store on disk keeps its files, and the name of a Redis store's stream
    url: of the Redis server
    keep_acknowledged: a durable store keeps the bytes of acknowledged units until `forget`
    """
    match kind:
        case "memory":
            from headrace.exchange.stores.memory import MemoryStore

            return MemoryStore(max_bytes)
        case "shared_memory":
            from headrace.exchange.stores.shared_memory import SharedMemoryStore

            return SharedMemoryStore(max_bytes)
        case "files":
            from headrace.exchange.stores.files import FileStore

            return FileStore(folder, max_bytes, keep_acknowledged=keep_acknowledged)
        case "redis":
            from headrace.exchange.stores.redis import RedisStore

            return RedisStore(url, f"headrace:{folder}", max_bytes, keep_acknowledged=keep_acknowledged)
    raise ConfigError("buffer.store", f"{kind!r} is not available; choose one of {', '.join(AVAILABLE)}")
