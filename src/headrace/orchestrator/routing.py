"""A request into the engine that shall serve it, by what the dispatcher itself sent where.

Never by a load or a cache that engines report: that is old when it arrives, and everybody then runs to the same one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from headrace.protocols import TrajectoryRequest
from headrace.types import GenerateRequest

if TYPE_CHECKING:
    from headrace.orchestrator.dispatcher import EngineSlot

Request = GenerateRequest | TrajectoryRequest

_PIECE = 32
"""Tokens by which prefixes are told apart."""
_REMEMBERED = 1 << 16
"""Most pieces of prompts that one engine is remembered to have seen."""
_TILT = 8
"""An engine with so many more outstanding requests than the idlest is passed over, whatever it has cached."""


class ByLoad:
    """The engine with the fewest outstanding requests."""

    def pick(self, request: Request, slots: list[EngineSlot]) -> EngineSlot | None:
        """None when there is no engine. An engine that keeps the request's keys and values in its memory comes first."""
        kept = request.kv_handle if isinstance(request, GenerateRequest) else None
        for slot in slots if kept is not None else ():
            if kept.startswith(f"{slot.name}:"):
                return slot
        return self.choose(request, slots)

    def choose(self, request: Request, slots: list[EngineSlot]) -> EngineSlot | None:
        return min(slots, key=lambda slot: len(slot.calls), default=None)

    def started(self, request: Request, slot: EngineSlot) -> None:
        """The request was sent there."""

    def ended(self, request: Request, slot: EngineSlot) -> None:
        """And is not there any more."""


class ByGroup(ByLoad):
    """Siblings go where the first of them went, while one of them is still there; a new group to the idlest engine."""

    def __init__(self) -> None:
        self._homes: dict[str, tuple[EngineSlot, int]] = {}

    def choose(self, request: Request, slots: list[EngineSlot]) -> EngineSlot | None:
        home, _ = self._homes.get(request.group_id, (None, 0))
        return home if home in slots else super().choose(request, slots)

    def started(self, request: Request, slot: EngineSlot) -> None:
        home, count = self._homes.get(request.group_id, (slot, 0))
        self._homes[request.group_id] = (slot, count + 1 if home is slot else 1)

    def ended(self, request: Request, slot: EngineSlot) -> None:
        home, count = self._homes.get(request.group_id, (None, 0))
        if home is not slot:
            return
        if count > 1:
            self._homes[request.group_id] = (slot, count - 1)
        else:
            del self._homes[request.group_id]


class ByPrefix(ByLoad):
    """The engine that was sent the longest beginning of the prompt under its present weights, unless others idle.

    For prompts with much in common across groups: system prompts, few-shot examples, conversations that go on.
    """

    def __init__(self) -> None:
        self._seen: dict[str, OrderedDict[tuple[bytes, int], None]] = {}

    def choose(self, request: Request, slots: list[EngineSlot]) -> EngineSlot | None:
        if not slots:
            return None
        pieces = _pieces(request)
        least = min(len(slot.calls) for slot in slots)
        able = [slot for slot in slots if len(slot.calls) < least + _TILT]
        return min(able, key=lambda slot: (-self._known(slot, pieces), len(slot.calls)))

    def _known(self, slot: EngineSlot, pieces: list[bytes]) -> int:
        seen = self._seen.get(slot.name, ())
        known = 0
        for piece in pieces:
            if (piece, slot.version) not in seen:
                break
            known += 1
        return known

    def started(self, request: Request, slot: EngineSlot) -> None:
        seen = self._seen.setdefault(slot.name, OrderedDict())
        for piece in _pieces(request):
            seen[piece, slot.version] = None
            seen.move_to_end((piece, slot.version))
        while len(seen) > _REMEMBERED:
            seen.popitem(last=False)


def _pieces(request: Request) -> list[bytes]:
    """A digest for each beginning of whole pieces, and one for the prompt itself. A trajectory has no prompt."""
    if not isinstance(request, GenerateRequest):
        return []
    ids = np.ascontiguousarray(request.prompt_ids, dtype=np.int64)
    digest, found = hashlib.blake2b(digest_size=12), []
    for start in range(0, len(ids), _PIECE):
        digest.update(ids[start : start + _PIECE].tobytes())
        found.append(digest.digest())
    return found


ROUTING = {"group": ByGroup, "load": ByLoad, "prefix": ByPrefix}
