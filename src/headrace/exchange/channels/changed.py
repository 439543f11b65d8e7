"""Sends the values that changed since the last version, by position, over any channel; receivers apply them to a copy.

A version travels whole when there is no base for it: the first one, every `full_every`-th, when names or shapes change,
when so much changed that positions and values would be larger, and on demand (`whole`) for a receiver whose base is another
one. Bits are compared and sent, so what a receiver ends with is equal to the last bit; the checksum of the whole result
travels along.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from headrace.errors import BaseMissing, PartFailed
from headrace.exchange.channels.layout import Layout, checksum, fill, plan, views
from headrace.protocols import WeightChannel
from headrace.types import MAIN_POLICY, NO_VERSION, Scope, WeightTicket

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size in bytes -> type under which values are compared and sent as they are."""
_WHOLE = "whole:"


@dataclasses.dataclass(slots=True, eq=False)
class _Base:
    """memory: [capacity] uint8, a whole version. `leases` counts reads of it that were not released."""

    memory: torch.Tensor
    layout: Layout
    version: int = NO_VERSION
    since_full: int = 0
    leases: int = 0
    whole: WeightTicket | None = None


class ChangedValues:
    """A `WeightChannel` around another. Costs a copy of the weights at the publisher and at each receiver."""

    def __init__(self, inner: WeightChannel, full_every: int = 20) -> None:
        self.inner, self.full_every = inner, full_every
        self.one_machine = getattr(inner, "one_machine", False)
        self._sent: dict[str, _Base] = {}
        self._held: dict[str, _Base] = {}
        self._reading = threading.Lock()
        self.share = 1.0
        """Of the values in the last version published that had changed."""

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "full_every": self.full_every}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ---------------------------------------------------------------------------------------------------- publishing

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        policy: str = MAIN_POLICY,
        scope: Scope = "full",
    ) -> WeightTicket:
        named = list(tensors)
        if scope != "full":
            return self.inner.publish(named, version, policy, scope)
        layout = plan(named)
        base = self._sent.get(policy)
        fits = base is not None and base.layout == layout and base.since_full + 1 < self.full_every
        changes = _compare(base, named) if base is not None and fits else None
        if base is None or changes is None:
            return self._publish_full(named, layout, version, policy)
        del self._sent[policy]  # until all of it went well: a base that is neither version would be worse than none
        before = base.version
        _apply(base.memory, changes)
        digest = checksum(base.memory, layout, version, policy)
        facts = [
            ("base", torch.tensor(before)),
            ("digest", torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)),
        ]
        ticket = self.inner.publish([*facts, *changes], version, policy, "changed")
        base.version, base.since_full, base.whole = version, base.since_full + 1, None
        self._sent[policy] = base
        return ticket

    def whole(self, policy: str = MAIN_POLICY) -> WeightTicket:
        """The last published version again, at full scope: for a receiver that has no base for it."""
        base = self._sent.get(policy)
        if base is None:
            raise PartFailed(f"no version of {policy!r} was published, so that none can be sent whole")
        if base.whole is None:
            inner = self.inner.publish(views(base.memory, base.layout).items(), base.version, f"{policy}+whole")
            base.whole = dataclasses.replace(inner, policy=policy, locator=_WHOLE + inner.locator)
        return base.whole

    def _publish_full(
        self, named: list[tuple[str, torch.Tensor]], layout: Layout, version: int, policy: str
    ) -> WeightTicket:
        base = self._sent.pop(policy, None)
        ticket = self.inner.publish(named, version, policy)
        if base is None or base.memory.numel() < layout.capacity:
            base = _Base(torch.zeros(layout.capacity, dtype=torch.uint8), layout)
        fill(base.memory, layout, named)
        base.layout, base.version, base.since_full, base.whole = layout, version, 0, ticket
        self._sent[policy] = base
        self.share = 1.0
        return ticket

    # ----------------------------------------------------------------------------------------------------- receiving

    def latest(self, policy: str | None = None) -> WeightTicket | None:
        return self.inner.latest(policy) if policy is not None else self.inner.latest()

    def read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        """All tensors of the version, whatever travelled. Raises `BaseMissing` when this end has not the version before."""
        if ticket.scope == "adapter":
            return self.inner.read(ticket)
        with self._reading:
            held = self._held.get(ticket.policy)
            if held is None or held.version != ticket.version:
                held = self._load(ticket, held) if ticket.scope == "full" else self._change(ticket, held)
                self._held[ticket.policy] = held
            held.leases += 1
            return views(held.memory, held.layout)

    def release(self, ticket: WeightTicket) -> None:
        if ticket.scope == "adapter":
            self.inner.release(ticket)
        elif (held := self._held.get(ticket.policy)) is not None and held.version == ticket.version and held.leases:
            held.leases -= 1

    def close(self) -> None:
        self.inner.close()
        self._sent.clear()
        self._held.clear()

    def _load(self, ticket: WeightTicket, held: _Base | None) -> _Base:
        inner = ticket
        if ticket.locator.startswith(_WHOLE):
            locator = ticket.locator.removeprefix(_WHOLE)
            inner = dataclasses.replace(ticket, policy=f"{ticket.policy}+whole", locator=locator)
        named = list(self.inner.read(inner).items())
        try:
            layout = plan(named)
            if held is None or held.leases or held.memory.numel() < layout.capacity:
                held = _Base(torch.zeros(layout.capacity, dtype=torch.uint8), layout)
            held.version = NO_VERSION
            fill(held.memory, layout, named)
        finally:
            del named
            self.inner.release(inner)
        held.layout, held.version, held.leases = layout, ticket.version, 0
        return held

    def _change(self, ticket: WeightTicket, held: _Base | None) -> _Base:
        if held is None:
            raise BaseMissing(
                f"version {ticket.version} of {ticket.policy!r} says what changed, and no version is here"
            )
        found = dict(self.inner.read(ticket))
        try:
            before = int(found.pop("base"))
            digest = bytes(found.pop("digest").tolist()).hex()
            if before != held.version:
                raise BaseMissing(
                    f"version {ticket.version} of {ticket.policy!r} says what changed since {before}, here is {held.version}"
                )
            if held.leases:
                held = _Base(held.memory.clone(), held.layout)
            held.version = NO_VERSION  # until it is whole again
            _apply(held.memory, list(found.items()))
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
            raise PartFailed(f"version {ticket.version} of {ticket.policy!r} is no list of changes: {error}") from None
        finally:
            del found
            self.inner.release(ticket)
        if checksum(held.memory, held.layout, ticket.version, ticket.policy) != digest:
            raise BaseMissing(
                f"version {ticket.version} of {ticket.policy!r} does not come out right on the base that is here"
            )
        held.version = ticket.version
        return held


def _compare(base: _Base, named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]] | None:
    """Positions and values of what differs, by item size, as flat indices into the base's memory; None when sending all
    would take fewer bytes."""
    places: dict[int, list[torch.Tensor]] = {}
    values: dict[int, list[torch.Tensor]] = {}
    size = 0
    for (_, tensor), (_, _, _, offset) in zip(named, base.layout.entries, strict=True):
        item = tensor.element_size()
        if not tensor.numel() or item not in _BITS:
            continue
        bits = _BITS[item]
        new = tensor.detach().cpu().contiguous().view(-1).view(bits)
        old = base.memory[offset : offset + new.numel() * item].view(bits)
        changed = (new != old).nonzero().flatten()
        size += changed.numel() * (item + 4)
        if size > base.layout.bytes:
            return None
        places.setdefault(item, []).append((changed + offset // item).to(_index_type(base.layout, item)))
        values.setdefault(item, []).append(new[changed])
    pairs = []
    for item in places:
        pairs += [(f"positions.{item}", torch.cat(places[item])), (f"values.{item}", torch.cat(values[item]))]
    return pairs


def _index_type(layout: Layout, item: int) -> torch.dtype:
    return torch.int32 if layout.bytes // item < 1 << 31 else torch.int64


def _apply(memory: torch.Tensor, changes: list[tuple[str, torch.Tensor]]) -> None:
    """Write the values to their positions. Raises `IndexError` for a position outside, `KeyError` for one without values."""
    found = dict(changes)
    for name, places in found.items():
        kind, _, item = name.partition(".")
        if kind != "positions":
            continue
        flat = memory.view(_BITS[int(item)])
        if places.numel():
            if int(places.min()) < 0 or int(places.max()) >= flat.numel():
                raise IndexError(f"a position is outside of {flat.numel()} values")
            flat[places.long()] = found[f"values.{item}"]
