"""Turns an ASGI app into a server in this event loop: its address is taken at once, and errors name the config's keys."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, MissingExtra
from headrace.rollout.config import ClientsConfig

SHORTEST_TOKEN = 16
MOST_CONNECTIONS = 2048


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def choose_token(given: str, host: str, note: Path) -> str:
    """The given token, that of an earlier start of this run, or a new one. One that others can reach is no short word."""
    if given:
        if not is_loopback(host) and len(given) < SHORTEST_TOKEN:
            raise ConfigError(
                "--token",
                f"found {len(given)} characters with the host {host!r}, which others can reach; "
                f"use at least {SHORTEST_TOKEN}, or leave it out and one is made",
            )
        return given
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(note.read_text(encoding="utf-8"))["token"])
    return secrets.token_urlsafe(24)


class Server:
    """Serves `app` until `close`. url: with the port that was taken."""

    def __init__(self, app: Any, config: ClientsConfig) -> None:
        try:
            import uvicorn
        except ImportError:
            raise MissingExtra("uvicorn", "serve", 'rollout.source = "http"') from None

        class Quiet(uvicorn.Server):
            """Signals are the run's, not the server's."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        self._socket = _listen(config.host, config.port)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = Quiet(settings)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http server")

    async def close(self) -> None:
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError("clients.port", f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    listening.setblocking(False)
    return listening


def write_note(note: Path, url: str, token: str) -> None:
    """Address and token for the run's own clients, readable by nobody else."""
    descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"url": url, "token": token}, file)
