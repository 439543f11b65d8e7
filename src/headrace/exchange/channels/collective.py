"""Moves weights by collective calls between processes that no launcher joined: gloo, or NCCL by the same code.

    receiver                     the publisher's TCPStore                 publisher, in a thread
      arrival: I, version 7  ──▶  arrival/12  ─────────────────────────▶  waits a moment for the others
      group 3, rank 1 of 3   ◀──  answer/12   ◀─────────────────────────  a group of those that came
      broadcast, bucket by bucket  ◀──────── gloo ────────────────────    (one receiver: point to point)

Groups are kept between versions while their members stay. When a broadcast breaks (a member died, or stands still past
the time-out), each of the others asks again and gets the version alone: survivors do not depend on each other twice.
The store and gloo have no passwords: they listen on loopback unless the address says otherwise, and then the network has
to be a trusted one. NCCL is untested.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels.base import CopyingChannel, Slot
from headrace.exchange.channels.layout import Layout, parse_manifest
from headrace.exchange.config import split_address
from headrace.types import WeightTicket

_BROKEN = (RuntimeError, OSError)
"""What torch raises when a store, a connection or a collective call breaks: DistError is a RuntimeError."""
_WRONG = (KeyError, ValueError, TypeError, AttributeError)
"""What an answer that is none leads to."""


class CollectiveChannel(CopyingChannel):
    """`address` is HOST:PORT of the publisher's store; port 0 takes a free one, which receivers learn from the ticket.

    bucket_mb: bytes that one call moves
    timeout_s: of one transfer; below half of the time that a sync allows, so that a broken one can be repeated
    gather_s: how long the first receiver of a version waits for the others
    backend: "gloo", or "nccl" (each receiver then needs a GPU of its own)
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        bucket_mb: float = 64.0,
        timeout_s: float = 20.0,
        gather_s: float = 0.05,
        backend: str = "gloo",
    ) -> None:
        super().__init__()
        self._host, self._port = split_address(address)
        self._bucket_mb, self._timeout_s, self._gather_s, self._backend = bucket_mb, timeout_s, gather_s, backend
        self._name = secrets.token_hex(8)
        self._publisher: _Publisher | None = None
        self._stores: dict[str, dist.TCPStore] = {}  # receiver: by address
        self._groups: dict[str, Any] = {}
        self._lock = threading.Lock()

    def settings(self) -> dict[str, object]:
        return {
            "address": f"{self._host}:{self._port}",
            "bucket_mb": self._bucket_mb,
            "timeout_s": self._timeout_s,
            "gather_s": self._gather_s,
            "backend": self._backend,
        }

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._groups.clear()
        self._stores.clear()
        super().close()

    def _offer(self, slot: Slot, policy: str, version: int) -> str:
        if self._publisher is None:
            self._publisher = _Publisher(self)
        return f"tcpstore://{self._publisher.host}:{self._publisher.port}/{self._publisher.session}"

    # ----------------------------------------------------------------------------------------------------- receiving

    def _receive(self, ticket: WeightTicket, room: Callable[[Layout], Slot]) -> Slot:
        with self._lock:
            try:
                return self._ask(ticket, room, alone=False)
            except (*_BROKEN, *_WRONG):
                self._groups.clear()
            try:
                return self._ask(ticket, room, alone=True)
            except (*_BROKEN, *_WRONG) as error:
                self._stores.pop(ticket.locator, None)
                first = str(error).partition("\n")[0]
                raise PartFailed(f"version {ticket.version} could not be received: {first}") from None

    def _ask(self, ticket: WeightTicket, room: Callable[[Layout], Slot], alone: bool) -> Slot:
        store = self._store(ticket.locator)
        number = store.add("arrivals", 1)
        arrival = {
            "receiver": self._name,
            "policy": ticket.policy,
            "version": ticket.version,
            "groups": [] if alone else list(self._groups),
            "alone": alone,
        }
        store.set(f"arrival/{number}", json.dumps(arrival))
        try:
            answer = json.loads(store.get(f"answer/{number}"))
        finally:
            with suppress(*_BROKEN):
                store.delete_key(f"answer/{number}")
        if "stale" in answer:
            raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is not kept any more")
        layout = parse_manifest(answer["manifest"].encode())
        if layout.bytes != ticket.bytes:
            raise PartFailed(f"the publisher has {layout.bytes} bytes for a ticket of {ticket.bytes}")
        slot = room(layout)
        group = answer["group"]
        if group not in self._groups:
            self._groups.clear()  # of other members: one at a time is enough
            self._groups[group] = self._join(store, group, answer["rank"], answer["size"])
        move(
            self._groups[group],
            slot.memory,
            layout.bytes,
            self._bucket_mb,
            answer["size"],
            root=False,
            seconds=self._timeout_s,
        )
        return slot

    def _store(self, locator: str) -> dist.TCPStore:
        if locator not in self._stores:
            scheme, _, rest = locator.partition("://")
            address, _, session = rest.partition("/")
            host, _, port = address.rpartition(":")
            if scheme != "tcpstore" or not session or not port.isdigit():
                raise PartFailed(f"not a ticket of the collective channel: {locator!r}")
            try:  # a store's own connecting tries again until its time is over
                socket.create_connection((host, int(port)), self._timeout_s).close()
            except ConnectionRefusedError:
                raise StaleTicket(f"the publisher at {host}:{port} has closed or died") from None
            store = dist.TCPStore(host, int(port), timeout=self._patience, wait_for_workers=False)
            self._stores = {locator: dist.PrefixStore(session, store)}
        return self._stores[locator]

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _join(self, store: Any, group: str, rank: int, size: int) -> Any:
        """The process group, once all its members have come."""
        inside = dist.PrefixStore(group, store)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._patience
            return dist.ProcessGroupNCCL(inside, rank, size, options)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._patience
        options._threads = 2
        return dist.ProcessGroupGloo(inside, rank, size, options)


def move(
    group: Any, memory: torch.Tensor, size: int, bucket_mb: float, members: int, *, root: bool, seconds: float
) -> None:
    """Send (as root) or receive the first `size` bytes of memory, a call for each bucket, all of them under way at once."""
    device = "cuda" if type(group).__name__ == "ProcessGroupNCCL" else "cpu"
    staged = memory[:size].to(device)
    bucket = max(1, int(bucket_mb * (1 << 20)))
    works = []
    for tag, start in enumerate(range(0, size, bucket)):
        piece = [staged[start : start + bucket]]
        if members > 2:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            works.append(group.broadcast(piece, options))
        else:
            works.append(group.send(piece, 1, tag) if root else group.recv(piece, 0, tag))
    for work in works:
        work.wait(timedelta(seconds=seconds))
    if device != "cpu" and not root:
        memory[:size].copy_(staged)


class _Publisher:
    """The other side: a store of its own and a thread that forms a group for those who ask for the same version."""

    def __init__(self, channel: CollectiveChannel) -> None:
        self.channel, self.host, self.session = channel, channel._host, secrets.token_hex(8)
        listening = socket.create_server((channel._host, channel._port))
        self.port = listening.getsockname()[1]
        self._master = dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=0.5),
            master_listen_fd=listening.detach(),
        )
        self._store = self._client()
        self._groups: dict[str, tuple[tuple[str, ...], Any]] = {}
        self._made = 0
        self._asked: dict[int, set[str]] = {}  # version -> receivers, of the two newest
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="weights-collective", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with suppress(*_BROKEN):  # wake the thread
            self._store.set(f"arrival/{self._store.add('arrivals', 1)}", "null")
        self._thread.join(1.0)
        self._groups.clear()

    def _client(self) -> Any:
        """A connection of one's own: calls on one connection wait for each other."""
        store = dist.TCPStore(self.host, self.port, wait_for_workers=False, timeout=timedelta(seconds=0.5))
        return dist.PrefixStore(self.session, store)

    def _serve(self) -> None:
        store, seen = self._client(), 0
        while not self._closed:
            arrived: dict[int, dict[str, Any]] = {}
            with suppress(*_BROKEN):  # a wait that ends in vain is a warning on the user's screen: it is a long one
                store.wait([f"arrival/{seen + 1}"], timedelta(days=1))
            deadline = time.monotonic() + self.channel._gather_s
            while not self._closed and time.monotonic() < deadline:
                if not store.check([f"arrival/{seen + 1}"]):
                    time.sleep(0.001)
                    continue
                seen += 1
                arrival = _arrival(store.get(f"arrival/{seen}"))
                store.delete_key(f"arrival/{seen}")
                if arrival is not None:
                    arrived[seen] = arrival
                    self._asked.setdefault(arrival["version"], set()).add(arrival["receiver"])
                    if self._all_here(arrival["version"]):
                        break
            for members in _together(arrived):
                threading.Thread(target=self._transfer, args=(members,), name="weights-transfer", daemon=True).start()

    def _all_here(self, version: int) -> bool:
        """Whether everybody who asked for the version before has asked for this one."""
        before = max((older for older in self._asked if older < version), default=None)
        for old in sorted(self._asked)[:-2]:
            del self._asked[old]
        return before is not None and self._asked[version] >= self._asked[before]

    def _transfer(self, members: dict[int, dict[str, Any]]) -> None:
        """Answer the members and send them the version; what breaks is theirs to ask for again."""
        channel, store = self.channel, self._client()
        policy, version = next((arrival["policy"], arrival["version"]) for arrival in members.values())
        slot = channel._published.lease(policy, version)
        try:
            if slot is None:
                for number in members:
                    store.set(f"answer/{number}", json.dumps({"stale": True}))
                return
            name, group = self._group(members)
            words = {"group": name, "size": len(members) + 1, "manifest": slot.layout.manifest().decode()}
            for rank, number in enumerate(members, start=1):
                store.set(f"answer/{number}", json.dumps({**words, "rank": rank}))
            if group is None:
                store.set_timeout(channel._patience)
                group = channel._join(store, name, 0, len(members) + 1)
            move(
                group,
                slot.memory,
                slot.layout.bytes,
                channel._bucket_mb,
                len(members) + 1,
                root=True,
                seconds=channel._timeout_s,
            )
            with self._lock:
                self._groups[name] = (_names(members), group)
        except _BROKEN:
            pass
        finally:
            if slot is not None:
                channel._published.release(policy, version)

    def _group(self, members: dict[int, dict[str, Any]]) -> tuple[str, Any]:
        """A group of these members that all of them still have, taken out while it is used; else a new name."""
        names = _names(members)
        with self._lock:
            for name, (of, group) in list(self._groups.items()):
                if of == names and all(name in arrival["groups"] for arrival in members.values()):
                    del self._groups[name]
                    return name, group
                if set(of) & set(names):
                    del self._groups[name]  # a member has left it
            self._made += 1
            return f"g{self._made}", None


def _arrival(data: bytes) -> dict[str, Any] | None:
    """What a receiver asks for; None for anything else (a publisher that closes wakes its thread so)."""
    kinds = {"receiver": str, "policy": str, "version": int, "groups": list, "alone": bool}
    try:
        found = json.loads(data)
    except ValueError:
        return None
    fits = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    return found if fits else None


def _together(arrivals: dict[int, dict[str, Any]]) -> list[dict[int, dict[str, Any]]]:
    """Those who may share a transfer: the same version, once each, and nobody who asks to be served alone."""
    shared: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for number, arrival in arrivals.items():
        key = (arrival["policy"], arrival["version"], number if arrival["alone"] else 0)
        shared.setdefault(key, {})[number] = arrival
    return [dict(sorted(members.items(), key=lambda pair: pair[1]["receiver"])) for members in shared.values()]


def _names(members: dict[int, dict[str, Any]]) -> tuple[str, ...]:
    return tuple(arrival["receiver"] for arrival in members.values())
