"""What every channel keeps: which ticket is the latest, which process may publish, and memory for two versions."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels.layout import Layout, checksum, fill, plan, views
from headrace.types import MAIN_POLICY, NO_VERSION, Scope, WeightTicket


class Channel:
    """The bookkeeping of one end. The object itself travels: `settings` are what the other end is opened with.

    reclaimed: buffers that were left to readers which did not release them, and replaced
    one_machine: both ends must be on the same one
    """

    one_machine = False

    def __init__(self) -> None:
        self.reclaimed = 0
        self._id = secrets.token_hex(8)
        self._claim: socket.socket | None = None
        self._latest: dict[str, WeightTicket] = {}
        self._last_policy = MAIN_POLICY

    def settings(self) -> dict[str, object]:
        """Arguments of the constructor."""
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {"settings": self.settings(), "id": self._id, "latest": self._latest, "last_policy": self._last_policy}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state["settings"])  # type: ignore[misc]
        self._id, self._last_policy = state["id"], state["last_policy"]  # type: ignore[assignment]
        self._latest.update(state["latest"])  # type: ignore[call-overload]

    def latest(self, policy: str | None = None) -> WeightTicket | None:
        """The last ticket that this end published, read, or can ask the medium for."""
        return self._latest.get(policy or self._last_policy)

    def _newest(self, policy: str) -> WeightTicket | None:
        """What a publisher has to go beyond."""
        return self._latest.get(policy)

    def _begin(self, version: int, policy: str) -> None:
        """Whether this end may publish the version. Raises `StaleTicket`, and `PartFailed` for a second publisher."""
        newest = self._newest(policy)
        if newest is not None and version <= newest.version:
            raise StaleTicket(f"version {version} of {policy!r} is not above {newest.version}, the last one published")
        if self._claim is None:
            self._claim = claim(self._id)

    def _remember(self, ticket: WeightTicket) -> None:
        known = self._latest.get(ticket.policy)
        if known is None or known.version < ticket.version:
            self._latest[ticket.policy], self._last_policy = ticket, ticket.policy

    def close(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def claim(name: str) -> socket.socket | None:
    """Be the one process of this machine that holds the name; the kernel gives it back when the process ends."""
    if sys.platform != "linux":
        return None
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0headrace-publisher-{name}")
    except OSError:
        holder.close()
        raise PartFailed(
            "another process publishes to this weight channel; two trainers would overwrite each other's versions"
        ) from None
    return holder


@dataclass(slots=True, eq=False)
class Slot:
    """memory: [capacity] uint8. `leases` counts who still needs the bytes."""

    memory: torch.Tensor
    layout: Layout
    version: int = NO_VERSION
    leases: int = 0


class Slots:
    """Memory for the `keep` newest versions of each policy, used in turn. Memory that is still leased is left to its readers
    and replaced, never overwritten: to wait for a reader of the same loop would be a deadlock."""

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None = None, keep: int = 2) -> None:
        self.reclaimed = 0
        self._keep = keep
        self._allocate = allocate or (lambda size: torch.zeros(size, dtype=torch.uint8))
        self._slots: dict[str, list[Slot]] = {}  # the latest last
        self._lock = threading.Lock()

    def spare(self, policy: str, layout: Layout) -> Slot:
        """Memory to fill, of no version until `add`."""
        with self._lock:
            slots = self._slots.setdefault(policy, [])
            if len(slots) == self._keep:
                slot = slots.pop(0)
                if not slot.leases and slot.memory.numel() >= layout.capacity:
                    slot.version, slot.layout = NO_VERSION, layout
                    return slot
                self.reclaimed += bool(slot.leases)
        return Slot(self._allocate(layout.capacity), layout)

    def add(self, policy: str, slot: Slot, version: int) -> None:
        with self._lock:
            slot.version = version
            self._slots.setdefault(policy, []).append(slot)

    def lease(self, policy: str, version: int) -> Slot | None:
        """The slot of a version, kept as it is until `release`; None when it is not here any more."""
        with self._lock:
            slot = self._find(policy, version)
            if slot is not None:
                slot.leases += 1
            return slot

    def release(self, policy: str, version: int) -> None:
        with self._lock:
            if (slot := self._find(policy, version)) is not None and slot.leases:
                slot.leases -= 1

    def _find(self, policy: str, version: int) -> Slot | None:
        return next((slot for slot in self._slots.get(policy, ()) if slot.version == version), None)

    def addresses(self) -> list[int]:
        """Where the slots' memory lies."""
        return [slot.memory.data_ptr() for slots in self._slots.values() for slot in slots]

    def clear(self) -> None:
        self._slots.clear()


class CopyingChannel(Channel):
    """A channel whose receivers get a copy of their own: the publisher fills a slot, `_receive` brings its bytes over.

    A subclass says where a version can be had (`_offer`) and how it is fetched (`_receive`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._published = Slots(self._allocate)
        self._received = Slots(keep=1)
        self._reading = threading.Lock()

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        policy: str = MAIN_POLICY,
        scope: Scope = "full",
    ) -> WeightTicket:
        self._begin(version, policy)
        named = list(tensors)
        layout = plan(named)
        slot = self._published.spare(policy, layout)
        self._withdraw(slot)
        fill(slot.memory, layout, named)
        slot.memory[layout.bytes : layout.capacity].zero_()
        digest = checksum(slot.memory, layout, version, policy)
        locator = self._offer(slot, policy, version)
        self._published.add(policy, slot, version)
        ticket = WeightTicket(
            policy=policy, version=version, scope=scope, locator=locator, checksum=digest, bytes=layout.bytes
        )
        self._remember(ticket)
        return ticket

    def read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        with self._reading:  # receivers that share a process share a copy
            return self._read(ticket)

    def _read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        slot = self._received.lease(ticket.policy, ticket.version)
        if slot is None:
            slot = self._receive(ticket, lambda layout: self._received.spare(ticket.policy, layout))
            slot.memory[slot.layout.bytes : slot.layout.capacity].zero_()
            slot.leases = 1
            self._received.add(ticket.policy, slot, ticket.version)
        if checksum(slot.memory, slot.layout, ticket.version, ticket.policy) != ticket.checksum:
            self.release(ticket)
            slot.version = NO_VERSION  # the next read asks for it again
            raise PartFailed(f"weights of version {ticket.version} do not match their checksum")
        self._remember(ticket)
        return views(slot.memory, slot.layout)

    def release(self, ticket: WeightTicket) -> None:
        self._received.release(ticket.policy, ticket.version)

    def close(self) -> None:
        super().close()
        self._published.clear()
        self._received.clear()

    @property
    def reclaimed(self) -> int:
        return self._published.reclaimed + self._received.reclaimed

    @reclaimed.setter
    def reclaimed(self, value: int) -> None:
        """Counted by the slots."""

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def _withdraw(self, slot: Slot) -> None:
        """The slot is about to be filled anew."""

    def _offer(self, slot: Slot, policy: str, version: int) -> str:
        """Make a filled slot available and say where."""
        raise NotImplementedError

    def _receive(self, ticket: WeightTicket, room: Callable[[Layout], Slot]) -> Slot:
        """Fetch a version's bytes into `room(its layout)`. Raises `StaleTicket` when it is not to be had any more."""
        raise NotImplementedError
