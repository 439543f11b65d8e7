"""Turns trajectories into many draws from the latest of them: a `Buffer` whose units stay after their batch was trained.

    admit → put → take (once each, as fresh) → trained, live → resident → evicted: only then its lease ends

`take` paces the trainer by what is new; what it trains on is drawn from all that is in the store. A resident lease takes up
no room: the store makes its own by evicting the oldest.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.ledger import TRAINED
from headrace.exchange.stores.replay import ReplayStore, Resident
from headrace.protocols import Lease
from headrace.types import Array, Metrics, Stat, Transitions

EVICTED = "evicted"


class ReplayBuffer(LeaseBuffer):
    """What `LeaseBuffer` is, over a `ReplayStore`. submitted = trained + dropped + in flight still holds: a unit that makes
    room before its turn came is dropped as "evicted", one that makes room after it counts as trained."""

    store: ReplayStore

    def __init__(self, source: Any, store: ReplayStore, *parts: Any, save: bool = True, **more: Any) -> None:
        """save: checkpoints hold the residents; priorities and use counts begin anew."""
        super().__init__(source, store, *parts, **more)
        self.save = save
        self.resident: dict[str, Lease] = {}
        """Trained and live, kept for further draws; oldest first."""
        self._drawn_lags: deque[Array] = deque(maxlen=1000)
        self._evicted_uses: deque[int] = deque(maxlen=1000)
        store.on_evict = self._on_evict

    def held(self) -> int:
        return len(self.ledger.in_flight) - len(self.resident)

    def settle(self, lease: Lease, outcome: str, remainder: Any = None) -> bool:
        """As in `LeaseBuffer`, but a trained lease goes on as a resident until its unit is evicted, or the buffer closes."""
        name = lease.lease_id
        if outcome == TRAINED and lease.state == "trained" and name in self.store and not self.closed:
            if name in self.resident:
                self.ledger.ignored_settles += 1
                return False
            self.resident[name] = lease
            self.changed.fire()
            return True
        self.resident.pop(name, None)
        return super().settle(lease, outcome, remainder)

    def kept(self) -> list[Lease]:
        return list(self.resident.values()) if self.save else []

    def draw(self, size: int, n_steps: int = 1, importance: float = 0.0) -> Transitions:
        """See `ReplayStore.draw`; the draw's lag is counted."""
        drawn = self.store.draw(size, n_steps, importance)
        versions, at = np.unique(drawn.policy_versions, return_inverse=True)
        self._drawn_lags.append(np.array([self.versions.lag(int(version)) for version in versions])[at])
        return drawn

    def reprioritise(self, serials: Array, errors: Array) -> None:
        self.store.reprioritise(serials, errors)

    def metrics(self) -> Metrics:
        """What is resident, and, since the last call, how old what was drawn was and how often what went had been used."""
        found: Metrics = {
            "replay/resident_steps": Stat(float(self.store.drawable)),
            "replay/resident_units": Stat(float(len(self.store.scan()))),
            "replay/evicted_units": Stat(float(self.store.evicted)),
        }
        for name, parts in (("replay/lag", self._drawn_lags), ("replay/uses_at_eviction", self._evicted_uses)):
            if parts:
                values = np.concatenate([np.atleast_1d(part) for part in parts])
                found[name] = Stat(float(values.sum()), float(values.size), float(values.max()))
                parts.clear()
        return found

    def _evict_stale(self) -> None:
        super()._evict_stale()
        if self.max_version_lag is not None:
            for resident in self.store.residents():
                if resident.key in self.resident and self.too_old(resident.oldest_version):
                    self.store.evict(resident)

    def _on_evict(self, resident: Resident) -> None:
        lease = self.ledger.in_flight.get(resident.key)
        self._evicted_uses.append(resident.uses)
        if lease is None:
            return
        if lease.state == "ready":
            self.settle(lease, EVICTED)
        elif resident.key in self.resident:
            del self.resident[resident.key]
            super().settle(lease, TRAINED)
        else:
            held = f"{self.store.capacity} steps do not hold the units that are being trained on"
            raise ConfigError("replay.capacity", f"{held}: raise it, or lower the batch or how far rollout runs ahead")
