"""Messages that are not what they say: servers, files, segments and stores that answer something else than weights."""

from __future__ import annotations

import dataclasses
import http.server
import json
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels import open_channel
from headrace.exchange.channels.collective import CollectiveChannel
from headrace.exchange.channels.http import HttpChannel
from headrace.exchange.channels.layout import parse_manifest, plan, views
from headrace.types import WeightTicket


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("something from outside was unpickled",))


WEIGHTS = [("w", torch.arange(1000.0))]
MANIFEST = plan(WEIGHTS).manifest()
TICKET = WeightTicket(policy="main", version=1, scope="full", locator="", checksum="00", bytes=4000)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{}",
        b"[4000]x",
        b"\xff\xfe",
        pickle.dumps(Bomb()),
        json.dumps([4000, ["w", "load", [1000], 0]]).encode(),
        json.dumps([4000, ["w", "float32", [1001], 0]]).encode(),
        json.dumps([4000, ["w", "float32", [-1], 0]]).encode(),
        json.dumps([4000, ["w", "float32", [1.5], 0]]).encode(),
        json.dumps([4000, ["w", "float32", [10], 3]]).encode(),
        json.dumps([-4000, ["w", "float32", [0], 0]]).encode(),
        json.dumps([True]).encode(),
        json.dumps([4000, ["w", "float32", [10]]]).encode(),
        json.dumps([4000, ["w", "float32", [1 << 62, 4], 0]]).encode(),
    ],
)
def test_a_manifest_that_would_write_elsewhere_is_refused(manifest):
    with pytest.raises(PartFailed, match="not a manifest"):
        parse_manifest(manifest)


def test_an_honest_manifest_is_read():
    layout = parse_manifest(MANIFEST)
    assert list(views(torch.zeros(layout.capacity, dtype=torch.uint8), layout)) == ["w"]


# ---------------------------------------------------------------------------------------------------------------- http


class Liar(http.server.BaseHTTPRequestHandler):
    answer: tuple[int, dict[str, str], bytes] = (200, {}, b"")

    def do_GET(self) -> None:
        status, headers, body = self.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def liar() -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


SAYS = {"X-Headrace-Manifest-Bytes": str(len(MANIFEST))}


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, b"hello"),
        (200, {"X-Headrace-Manifest-Bytes": "-5"}, b""),
        (200, {"X-Headrace-Manifest-Bytes": "99999999999"}, b""),
        (200, {"X-Headrace-Manifest-Bytes": "many"}, b""),
        (200, {"X-Headrace-Manifest-Bytes": "500"}, pickle.dumps(Bomb())),
        (200, SAYS, MANIFEST + b"x" * 100),  # ends early
        (200, SAYS, MANIFEST + b"x" * 4000),  # other bytes
        (200, {**SAYS, "Content-Length": "9"}, MANIFEST[:9]),
        (200, {"X-Headrace-Manifest-Bytes": "13"}, b'[8,["w","int8",[8],0]]'),
        (302, {"Location": "http://127.0.0.1:1/"}, b""),
        (401, {}, b""),
        (500, {}, b""),
    ],
)
def test_a_server_that_is_none_of_ours_fails_one_prepare(liar, answer):
    Liar.answer = answer
    channel = HttpChannel(timeout_s=2.0)
    ticket = dataclasses.replace(TICKET, locator=f"http://127.0.0.1:{liar.server_address[1]}/weights/main/1")
    with pytest.raises(PartFailed) as caught:
        channel.read(ticket)
    assert "\n" not in str(caught.value)
    good = channel.publish(WEIGHTS, 2)
    assert channel.read(good)["w"][999] == 999
    channel.close()


def test_a_server_that_stands_still_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = HttpChannel(timeout_s=0.3)
        started = time.monotonic()
        with pytest.raises(PartFailed, match="timed out"):
            channel.read(
                dataclasses.replace(TICKET, locator=f"http://127.0.0.1:{silent.getsockname()[1]}/weights/main/1")
            )
        assert time.monotonic() - started < 3
        channel.close()


@pytest.mark.parametrize(
    "request_line", [b"GARBAGE\r\n\r\n", b"GET /weights/main/1 HTTP/1.1\r\n\r\n", b"GET /../../etc HTTP/1.1\r\n\r\n"]
)
def test_a_stranger_without_the_token_gets_nothing_and_harms_nobody(request_line):
    channel = HttpChannel()
    ticket = channel.publish(WEIGHTS, 1)
    host, port = channel._server.server_address[:2]
    with socket.create_connection((host, port), 5) as stranger:
        stranger.sendall(request_line)
        reply = stranger.recv(1 << 16)
    assert b" 401 " in reply or b" 400 " in reply
    assert channel.read(ticket)["w"][1] == 1
    assert host == "127.0.0.1"
    channel.close()


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("content", ["empty", "short", "pickle", "torch", "long_header", "swapped", "gone"])
def test_a_file_that_is_not_what_its_ticket_says_is_refused(tmp_path, content):
    channel = open_channel("filesystem", folder=str(tmp_path))
    ticket = channel.publish(WEIGHTS, 1)
    path = Path(ticket.locator.removeprefix("file://"))
    data = path.read_bytes()
    match content:
        case "empty":
            path.write_bytes(b"")
        case "short":
            path.write_bytes(data[:-1])
        case "pickle":
            path.write_bytes(pickle.dumps(Bomb()))
        case "torch":
            torch.save({"w": torch.zeros(1000)}, path)
        case "long_header":
            path.write_bytes(struct.pack("<Q", 1 << 50) + data[8:])
        case "swapped":
            path.write_bytes(data[:-8] + data[-4:] + data[-8:-4])
        case "gone":
            path.unlink()
    with pytest.raises(StaleTicket if content == "gone" else PartFailed):
        channel.read(ticket)
    assert channel.read(channel.publish(WEIGHTS, 2))["w"][999] == 999
    channel.close()


def test_a_latest_that_is_no_ticket_is_said(tmp_path):
    channel = open_channel("filesystem", folder=str(tmp_path))
    channel.publish(WEIGHTS, 1)
    (tmp_path / "main" / "latest.json").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PartFailed, match="is not a ticket"):
        channel.latest()
    channel.close()


def test_a_writer_that_died_in_the_middle_left_nothing_that_can_be_read(tmp_path):
    channel = open_channel("filesystem", folder=str(tmp_path))
    channel.publish(WEIGHTS, 1)
    (tmp_path / "main" / ".0000000002.safetensors.new").write_bytes(b"half")
    assert channel.latest().version == 1
    assert channel.publish(WEIGHTS, 2).version == 2
    assert not list((tmp_path / "main").glob(".*.new"))
    channel.close()


# ---------------------------------------------------------------------------------------------------------- collective


@pytest.mark.parametrize("message", [b"\xff", b"7", b"[]", b"{}", b'{"receiver": 1}', pickle.dumps(Bomb())])
def test_a_strangers_words_in_the_store_are_passed_over(message):
    channel = CollectiveChannel(timeout_s=2.0)
    ticket = channel.publish(WEIGHTS, 1)
    store = channel._publisher._client()
    store.set(f"arrival/{store.add('arrivals', 1)}", message)
    assert channel.read(ticket)["w"][999] == 999
    channel.close()


def test_an_answer_that_is_none_fails_one_prepare():
    channel = CollectiveChannel(timeout_s=1.0)
    ticket = channel.publish(WEIGHTS, 1)
    channel._publisher._transfer = lambda members: channel._publisher._client().set(f"answer/{min(members)}", "{}")
    with pytest.raises(PartFailed):
        channel.read(ticket)
    channel.close()
