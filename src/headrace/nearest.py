"""A config that names parts which are not here into one with the nearest that are, and a line for each exchange.

A part may be missing because it is not built, because its package is not installed, or because its server does not answer.
Nothing is exchanged in silence: a run goes on with the nearest parts only when it is told to (`--nearest`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.config import RunConfig, resolve
from headrace.errors import ConfigError
from headrace.valid_config import available

NEAREST = {
    "placement": "sync",
    "runtime": "processes",
    "buffer.store": "memory",
    "training.backend": "single_device",
    "training.lora.kind": "off",
}
"""Axis -> what stands in for a choice that is not here. A channel's stand-in depends on the runtime."""

PACKAGES = {
    ("runtime", "ray"): "ray",
    ("buffer.store", "redis"): "redis",
    ("training.lora.kind", "adapter"): "peft",
    ("training.lora.kind", "merged"): "peft",
    ("training.backend", "deepspeed"): "deepspeed",
    ("training.backend", "jax"): "jax",
    ("weights.channel", "mesh"): "jax",
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One part that is not here, why, and what would be used in its place."""

    path: str
    found: str
    why: str
    nearest: str

    def __str__(self) -> str:
        return f'{self.path} = "{self.found}" {self.why}; the nearest is "{self.nearest}"'


def substitute(config: RunConfig) -> tuple[RunConfig, list[Exchange]]:
    """The config with the nearest parts that are here, and what was exchanged for it."""
    exchanges: list[Exchange] = []
    for path in available():
        found = _get(config, path)
        if (why := _missing(config, path, found)) is None:
            continue
        nearest = NEAREST.get(path) or ("in_process" if resolve(config).runtime == "local" else "shared_memory")
        config = _with(config, path, nearest)
        exchanges.append(Exchange(path, found, why, nearest))
    return config, exchanges


def exchanged(config: RunConfig, *, allowed: bool) -> tuple[RunConfig, list[Exchange]]:
    """`substitute`, refused in one line unless it is allowed or nothing is missing."""
    nearest, exchanges = substitute(config)
    refuse(exchanges, allowed=allowed)
    return nearest, exchanges


def refuse(exchanges: Sequence[Exchange | str], *, allowed: bool) -> None:
    """All of them in one line, unless they are allowed."""
    if exchanges and not allowed:
        raise ConfigError("", f"{'; '.join(map(str, exchanges))}: add --nearest to go on with that")


def _missing(config: RunConfig, path: str, found: str) -> str | None:
    """Why a choice cannot be had here; None: it can."""
    if found == "auto":
        return None
    if found not in available()[path]:
        return "is not available in this version"
    package = PACKAGES.get((path, found))
    if package is not None and importlib.util.find_spec(package) is None:
        return f"needs the package {package}, which is not installed"
    if (path, found) == ("buffer.store", "redis") and not answers(config.buffer.url):
        return f"finds no Redis server at buffer.url = {config.buffer.url!r} (redis://HOST:PORT/DB)"
    return None


def answers(url: str) -> bool:
    """Whether a Redis server is there that lets this address in: something else may listen at its port."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_connect_timeout=0.5, socket_timeout=2.0) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError, ValueError):  # the last for what is no address
        return False


def _get(config: Any, path: str) -> str:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _with(config: Any, path: str, value: str) -> Any:
    head, _, rest = path.partition(".")
    return msgspec.structs.replace(config, **{head: _with(getattr(config, head), rest, value) if rest else value})


AXES = ("placement", "runtime", "depth", "staleness", "channel", "interruption", "partial", "lora", "backend")


def axes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Each axis with the config's choice, in words."""
    config = resolve(config)
    buffer, stale, weights, training = config.buffer, config.staleness, config.weights, config.training
    depth = f"queue {buffer.steps}" if buffer.depth == "queue" else buffer.depth
    rules = [
        f"lag {stale.max_version_lag}" if stale.max_version_lag is not None else "",
        f"ahead {stale.max_steps_ahead}" if stale.max_steps_ahead is not None else "",
        training.correction.kind if training.correction.kind != "none" else "",
        "cancel" if stale.cancel_group else "",
    ]
    yield "placement", config.placement
    yield "runtime", config.runtime
    yield "depth", depth if buffer.store == "memory" else f"{depth}, {buffer.store}"
    yield "staleness", " + ".join(filter(None, rules)) or "-"
    yield "channel", weights.channel
    yield "interruption", weights.interruption
    yield "partial", weights.partial
    yield "lora", training.lora.kind
    yield "backend", training.backend
