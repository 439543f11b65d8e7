"""Moves weights between parts of one process: a version is copied into one of two buffers, readers get views of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from headrace.errors import ConfigError, PartFailed, StaleTicket
from headrace.exchange.channels.base import Channel, Slots
from headrace.exchange.channels.layout import checksum, fill, plan, views
from headrace.types import MAIN_POLICY, Scope, WeightTicket


class InProcessChannel(Channel):
    """One object for the publisher and all readers."""

    def __init__(self) -> None:
        super().__init__()
        self._slots = Slots()

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
        slot = self._slots.spare(policy, layout)
        fill(slot.memory, layout, named)
        self._slots.add(policy, slot, version)
        self.reclaimed = self._slots.reclaimed
        ticket = WeightTicket(
            policy=policy,
            version=version,
            scope=scope,
            locator=f"in_process:{id(self):x}",
            checksum=checksum(slot.memory, layout, version, policy),
            bytes=layout.bytes,
        )
        self._remember(ticket)
        return ticket

    def read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        slot = self._slots.lease(ticket.policy, ticket.version)
        if slot is None:
            raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is not kept any more")
        if checksum(slot.memory, slot.layout, ticket.version, ticket.policy) != ticket.checksum:
            self.release(ticket)
            raise PartFailed(f"weights of version {ticket.version} do not match their checksum")
        return views(slot.memory, slot.layout)

    def release(self, ticket: WeightTicket) -> None:
        self._slots.release(ticket.policy, ticket.version)

    def close(self) -> None:
        super().close()
        self._slots.clear()

    def __reduce__(self) -> tuple[object, ...]:
        raise ConfigError("weights.channel", "'in_process' cannot reach another process; use 'shared_memory'")
