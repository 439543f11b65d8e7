"""How a version's tensors reach the engines: one file per medium, opened by name."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.protocols import WeightChannel

AVAILABLE = ("in_process", "shared_memory")


def open_channel(kind: str, lease_timeout_s: float = 5.0) -> WeightChannel:
    """The channel called `kind`. `lease_timeout_s` is how long a publisher waits for a reader that does not release."""
    match kind:
        case "in_process":
            from headrace.exchange.channels.in_process import InProcessChannel

            return InProcessChannel()
        case "shared_memory":
            from headrace.exchange.channels.shared_memory import SharedMemoryChannel

            return SharedMemoryChannel(lease_timeout_s=lease_timeout_s)
    raise ConfigError("weights.channel", f"{kind!r} is not available; choose one of {', '.join(AVAILABLE)}")
