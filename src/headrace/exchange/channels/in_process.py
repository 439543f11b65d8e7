"""Moves weights between parts of one process: a version is copied into one of two buffers, readers get views of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from headrace.errors import ConfigError, PartFailed, StaleTicket
from headrace.exchange.channels.layout import Layout, checksum, fill, plan, views
from headrace.types import MAIN_POLICY, NO_VERSION, WeightTicket


@dataclass(slots=True, eq=False)
class _Slot:
    """memory: [capacity] uint8. `leases` counts reads that were not released yet."""

    memory: torch.Tensor
    layout: Layout
    version: int = NO_VERSION
    leases: int = 0


class InProcessChannel:
    """One object for the publisher and all readers. A buffer that is still leased is left to its readers and replaced,
    never overwritten: waiting for a reader of the same loop would be a deadlock."""

    def __init__(self) -> None:
        self.reclaimed = 0
        self._slots: dict[str, list[_Slot]] = {}  # per policy, the latest last, at most two
        self._latest: dict[str, WeightTicket] = {}
        self._last_policy = MAIN_POLICY

    def publish(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, policy: str = MAIN_POLICY
    ) -> WeightTicket:
        newest = self._latest.get(policy)
        if newest is not None and version <= newest.version:
            raise StaleTicket(f"version {version} of {policy!r} is not above {newest.version}, the last one published")
        named = list(tensors)
        layout = plan(named)
        slots = self._slots.setdefault(policy, [])
        slot = self._spare(slots, layout)
        slot.version, slot.layout = NO_VERSION, layout
        fill(slot.memory, layout, named)
        slot.version = version
        slots.append(slot)
        ticket = WeightTicket(
            policy=policy,
            version=version,
            scope="full",
            locator=f"in_process:{id(self):x}",
            checksum=checksum(slot.memory, layout, version),
            bytes=layout.bytes,
        )
        self._latest[policy], self._last_policy = ticket, policy
        return ticket

    def latest(self, policy: str | None = None) -> WeightTicket | None:
        return self._latest.get(policy or self._last_policy)

    def read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        slot = self._find(ticket)
        if slot is None:
            raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is not kept any more")
        if checksum(slot.memory, slot.layout, ticket.version) != ticket.checksum:
            raise PartFailed(f"weights of version {ticket.version} do not match their checksum")
        slot.leases += 1
        return views(slot.memory, slot.layout)

    def release(self, ticket: WeightTicket) -> None:
        if (slot := self._find(ticket)) is not None and slot.leases:
            slot.leases -= 1

    def close(self) -> None:
        self._slots.clear()

    def __reduce__(self) -> tuple[object, ...]:
        raise ConfigError("weights.channel", "'in_process' cannot reach another process; use 'shared_memory'")

    def _find(self, ticket: WeightTicket) -> _Slot | None:
        return next((slot for slot in self._slots.get(ticket.policy, ()) if slot.version == ticket.version), None)

    def _spare(self, slots: list[_Slot], layout: Layout) -> _Slot:
        """The older of two slots when nobody reads it and it is large enough, else fresh memory."""
        if len(slots) == 2:
            slot = slots.pop(0)
            if not slot.leases and slot.memory.numel() >= layout.capacity:
                return slot
            self.reclaimed += bool(slot.leases)
        return _Slot(torch.zeros(layout.capacity, dtype=torch.uint8), layout)
