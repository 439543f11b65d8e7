"""How a version's tensors reach the engines: one file per medium, opened by name."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.protocols import WeightChannel

AVAILABLE = ("in_process", "shared_memory", "collective", "ipc", "filesystem", "http")


def open_channel(
    kind: str,
    *,
    lease_timeout_s: float = 5.0,
    folder: str = "weights",
    address: str = "127.0.0.1:0",
    bucket_mb: float = 64.0,
    timeout_s: float = 20.0,
    scope: str = "full",
    full_every: int = 20,
) -> WeightChannel:
    """The channel called `kind`.

    lease_timeout_s: how long a publisher waits for a reader that does not release (shared_memory)
    folder: where versions are written (filesystem)
    address: HOST:PORT that the publisher listens at (http, collective)
    bucket_mb: bytes that one call moves (collective)
    timeout_s: of a transfer that stands still (http, collective)
    scope: "changed" sends what changed since the last version, and every `full_every`-th version whole
    """
    if scope == "changed":
        from headrace.exchange.channels.changed import ChangedValues

        inner = open_channel(
            kind,
            lease_timeout_s=lease_timeout_s,
            folder=folder,
            address=address,
            bucket_mb=bucket_mb,
            timeout_s=timeout_s,
        )
        return ChangedValues(inner, full_every)
    match kind:
        case "in_process":
            from headrace.exchange.channels.in_process import InProcessChannel

            return InProcessChannel()
        case "shared_memory":
            from headrace.exchange.channels.shared_memory import SharedMemoryChannel

            return SharedMemoryChannel(lease_timeout_s)
        case "collective":
            from headrace.exchange.channels.collective import CollectiveChannel

            return CollectiveChannel(address, bucket_mb, timeout_s)
        case "ipc":
            from headrace.exchange.channels.ipc import IpcChannel

            return IpcChannel()
        case "filesystem":
            from headrace.exchange.channels.filesystem import FilesystemChannel

            return FilesystemChannel(folder)
        case "http":
            from headrace.exchange.channels.http import HttpChannel

            return HttpChannel(address, timeout_s=timeout_s)
    raise ConfigError("weights.channel", f"{kind!r} is not available; choose one of {', '.join(AVAILABLE)}")
