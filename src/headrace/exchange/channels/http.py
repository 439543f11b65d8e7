"""Moves weights over HTTP: the publisher serves its two newest versions, receivers stream them into their own memory.

    GET /latest/POLICY               the newest ticket, as JSON
    GET /weights/POLICY/VERSION      manifest, then the tensors' bytes, with their lengths and checksum in the header

Every request needs ``Authorization: Bearer TOKEN``. The token is made with the channel and travels with the object to the
workers; whoever pulls from elsewhere is given it. The server binds to loopback unless the address says otherwise.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import secrets
import threading
from collections.abc import Callable
from urllib.parse import quote, unquote, urlsplit

import msgspec

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels.base import CopyingChannel, Slot
from headrace.exchange.channels.layout import Layout, parse_manifest
from headrace.exchange.config import split_address
from headrace.types import WeightTicket

_MANIFEST_BYTES = "X-Headrace-Manifest-Bytes"
_LARGEST_MANIFEST_BYTES = 64 << 20


class HttpChannel(CopyingChannel):
    """`address` is HOST:PORT of the publisher; port 0 takes a free one, which receivers learn from the ticket.

    timeout_s: of one read or write on a connection; a peer that stands still for longer is given up
    """

    def __init__(self, address: str = "127.0.0.1:0", token: str = "", timeout_s: float = 20.0) -> None:
        super().__init__()
        self._host, self._port = split_address(address)
        self._timeout_s = timeout_s
        self._token = token or secrets.token_urlsafe(24)
        self._server: _Server | None = None

    def settings(self) -> dict[str, object]:
        return {"address": f"{self._host}:{self._port}", "token": self._token, "timeout_s": self._timeout_s}

    def latest(self, policy: str | None = None) -> WeightTicket | None:
        """Of the publisher, where its address is known; else the last that this end has seen."""
        if self._server is not None or not self._port:
            return super().latest(policy)
        try:
            with self._get(
                f"{self._host}:{self._port}", f"/latest/{quote(policy or self._last_policy, safe='')}"
            ) as answer:
                return msgspec.json.decode(answer.read(1 << 20), type=WeightTicket)
        except StaleTicket:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise PartFailed(f"no ticket from {self._host}:{self._port}: {error}") from None

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        super().close()

    def _offer(self, slot: Slot, policy: str, version: int) -> str:
        if self._server is None:
            self._server = _Server(self, (self._host, self._port), self._timeout_s)
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}/weights/{quote(policy, safe='')}/{version}"

    def _receive(self, ticket: WeightTicket, room: Callable[[Layout], Slot]) -> Slot:
        url = urlsplit(ticket.locator)
        if url.scheme != "http" or not url.netloc:
            raise PartFailed(f"not a ticket of the http channel: {ticket.locator!r}")
        try:
            with self._get(url.netloc, url.path) as answer:
                size = int(answer.headers.get(_MANIFEST_BYTES, "-1"))
                if not 0 <= size <= _LARGEST_MANIFEST_BYTES:
                    raise PartFailed(f"{ticket.locator} does not answer with weights")
                layout = parse_manifest(answer.read(size))
                if layout.bytes != ticket.bytes:
                    raise PartFailed(f"{ticket.locator} has {layout.bytes} bytes, its ticket says {ticket.bytes}")
                slot = room(layout)
                target = memoryview(slot.memory[: layout.bytes].numpy())
                while target:
                    if not (got := answer.readinto(target)):
                        raise PartFailed(f"{ticket.locator} ended {len(target)} bytes early")
                    target = target[got:]
                return slot
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PartFailed(f"{ticket.locator} cannot be read: {error}") from None

    @contextlib.contextmanager
    def _get(self, netloc: str, path: str):  # type: ignore[no-untyped-def]
        connection = http.client.HTTPConnection(netloc, timeout=self._timeout_s)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            if answer.status == 404:
                raise StaleTicket(f"{path} is not kept any more at {netloc}")
            if answer.status != 200:
                raise PartFailed(f"http://{netloc}{path} answers {answer.status} {answer.reason}")
            yield answer
        finally:
            connection.close()


class _Server(http.server.ThreadingHTTPServer):
    """Serves what its channel has published, from threads of its own."""

    daemon_threads = True

    def __init__(self, channel: HttpChannel, address: tuple[str, int], timeout_s: float) -> None:
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise PartFailed(f"weights.address: cannot listen at {address[0]}:{address[1]}: {error.strerror}") from None
        self.channel, self.timeout_s = channel, timeout_s
        threading.Thread(target=self.serve_forever, args=(0.05,), name="weights-http", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A receiver that went away is its own affair."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        self.timeout = self.server.timeout_s
        super().setup()

    def do_GET(self) -> None:
        channel = self.server.channel
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {channel._token}".encode()):
            self.send_error(401)
            return
        match [unquote(part) for part in self.path.strip("/").split("/")]:
            case ["latest", policy]:
                ticket = channel._latest.get(policy)
                self._send(msgspec.json.encode(ticket)) if ticket is not None else self.send_error(404)
            case ["weights", policy, version] if version.isdigit():
                self._weights(policy, int(version))
            case _:
                self.send_error(404)

    def _weights(self, policy: str, version: int) -> None:
        slots = self.server.channel._published
        slot = slots.lease(policy, version)
        if slot is None:
            self.send_error(404)
            return
        try:
            manifest = slot.layout.manifest()
            self.send_response(200)
            self.send_header(_MANIFEST_BYTES, str(len(manifest)))
            self.send_header("Content-Length", str(len(manifest) + slot.layout.bytes))
            self.end_headers()
            self.wfile.write(manifest)
            self.wfile.write(memoryview(slot.memory[: slot.layout.bytes].numpy()))
        finally:
            slots.release(policy, version)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence: a run's own lines are its display."""
