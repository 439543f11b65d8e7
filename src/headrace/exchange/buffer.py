"""Tasks into leases, finished units into batches: the one owner of admission and of what waits for the trainer.

Only `admit` and `take` wait. `put` never does: otherwise a weight sync that waits for running rollouts would wait for a
producer that waits for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.errors import BufferClosed, UnitLost
from headrace.exchange.ledger import RECYCLED, TRAINED, Ledger
from headrace.exchange.staleness import Capacity, VersionLine, is_stale
from headrace.protocols import Lease, Store, TaskSource
from headrace.signals import Signal
from headrace.types import Task, Unit


class LeaseBuffer:
    """The `Buffer` of every run; where the bytes lie is the store's matter.

    `on_drop(lease, reason, unit)` is told of each lease that ends untrained, with its unit if there was one.
    """

    def __init__(
        self,
        source: TaskSource,
        store: Store,
        ledger: Ledger,
        versions: VersionLine,
        capacity: Capacity,
        *,
        max_version_lag: int | None = None,
        on_stale: str = "drop",
        incarnation: int = 0,
        on_drop: Callable[[Lease, str, Unit | None], None] = lambda lease, reason, unit: None,
    ) -> None:
        self.source, self.store, self.ledger, self.versions, self.capacity = source, store, ledger, versions, capacity
        self.max_version_lag, self.on_stale = max_version_lag, on_stale
        self.incarnation = incarnation
        self.on_drop = on_drop
        self.on_put: Callable[[Unit], None] = lambda unit: None
        """Told of each unit that is handed in: a source that orders tasks by what they turn out to be learns from it."""
        self.next_index = 0
        self.pool: deque[tuple[Task, Any]] = deque()
        """Recycled tasks with what was done of them; they go before the source's next."""
        self.restored: deque[tuple[int, Task, Any]] = deque()
        """Leases of an earlier incarnation that were running: they keep their index, so their samples repeat."""
        self.ready: dict[str, Lease] = {}
        """Leases whose unit lies in the store, in the order of their put."""
        self.wanted: int | None = None
        """Units that the trainer will still take; what is admitted beyond them would be sampled for nothing."""
        self.changed = Signal()
        self.closed = False
        self._source_ended = False

    # ------------------------------------------------------------------------------------------------ admission

    def room(self) -> int:
        running = self.ledger.count("admitted")
        room = self.capacity.room(running=running, held=self.held())
        if self.wanted is None:
            return room
        coming = self.ledger.count("admitted", "ready", "taken")
        return max(0, min(room, self.wanted + self.capacity.oversample - coming))

    def held(self) -> int:
        """Leases that take up room."""
        return len(self.ledger.in_flight)

    def kept(self) -> list[Lease]:
        """Trained leases whose units a checkpoint holds all the same."""
        return []

    def keep(self, lease: Lease, unit: Unit) -> None:
        """Walk such a lease, admitted anew from a checkpoint, to where it was."""
        self.put(lease, unit)
        del self.ready[lease.lease_id]
        self.ledger.move(lease, "taken")
        self.ledger.move(lease, "trained")
        self.settle(lease, TRAINED)

    async def admit(self) -> Lease:
        """Wait for room, then pick the task. Raises `BufferClosed` once nothing more can be admitted."""
        while True:
            if self.closed:
                raise BufferClosed("the buffer is closed")
            if self.room() > 0:
                lease = self._next_lease()
                # A batch is let in whatever the store's bound: a trainer that waits for it would wait for ever.
                if lease is not None and (self.store.reserve(lease.lease_id) or self._below_a_batch()):
                    self.ledger.admit(lease)
                    return lease
                if lease is not None:
                    self.restored.appendleft((lease.index, lease.task, lease.remainder))
                elif not self._may_recycle():
                    raise BufferClosed("the source has ended")
            await self.changed.wait()

    def _below_a_batch(self) -> bool:
        return self.ledger.count("admitted", "ready", "taken") < self.capacity.batch

    def _next_lease(self) -> Lease | None:
        if self.restored:
            return self._lease(*self.restored.popleft())
        remainder = self.pool[0][1] if self.pool else None
        if (task := self.next_task()) is None:
            return None
        index, self.next_index = self.next_index, self.next_index + 1
        return self._lease(index, task, remainder)

    def next_task(self) -> Task | None:
        """The pool's first, else the source's next; None when both are empty."""
        if self.pool:
            return self.pool.popleft()[0]
        task = None if self._source_ended else self.source.next()
        if task is None and not self._source_ended:
            self._source_ended = True
            self.changed.fire()
        return task

    def _lease(self, index: int, task: Task, remainder: Any) -> Lease:
        return Lease(lease_id=f"{self.incarnation}-{index}", index=index, task=task, remainder=remainder)

    def _may_recycle(self) -> bool:
        return self.ledger.count("admitted", "ready") > 0

    # ------------------------------------------------------------------------------------------------- the store

    def put(self, lease: Lease, unit: Unit) -> bool:
        """Hand in the unit of a running lease; False when the lease was settled in the meantime."""
        if lease.state != "admitted":
            return False
        self.store.append(lease.lease_id, unit)
        lease.oldest_version = unit.oldest_version
        self.ledger.move(lease, "ready")
        self.ready[lease.lease_id] = lease
        self.on_put(unit)
        self.changed.fire()
        return True

    async def take(self, n: int, version: int, at_least: int | None = None) -> list[tuple[Lease, Unit]]:
        """n units no staler than allowed at `version` (the trainer's), by lease index; `at_least` so many, when it is given.
        Age is judged here, so that time in the queue counts. Fewer, or none, only when nothing more can come."""
        while True:
            self._evict_stale()
            if len(self.ready) >= (n if at_least is None else at_least) or self._nothing_comes():
                picked = sorted(list(self.ready.values())[:n], key=lambda lease: lease.index)
                if (batch := self._take_all(picked)) is not None:
                    return batch
                continue
            await self.changed.wait()

    def _take_all(self, picked: list[Lease]) -> list[tuple[Lease, Unit]] | None:
        """The leases with their units, taken; None when the store has lost one (then it is dropped, and no other taken)."""
        batch = []
        for lease in picked:
            if (unit := self._read(lease)) is None:
                self.settle(lease, "lost")
                return None
            batch.append((lease, unit))
        for lease in picked:
            self.ledger.move(lease, "taken")
            del self.ready[lease.lease_id]
        return batch

    def _read(self, lease: Lease) -> Unit | None:
        """None when the store's medium has lost it: a server that restarted without its data, a damaged file."""
        try:
            return self.store.read(lease.lease_id)
        except UnitLost:
            return None

    def untake(self, lease: Lease) -> None:
        """Put a taken unit back to the ready ones: its batch never came together."""
        self.ledger.move(lease, "ready")
        self.ready[lease.lease_id] = lease
        self.changed.fire()

    def _evict_stale(self) -> None:
        if self.max_version_lag is None:
            return
        for lease in list(self.ready.values()):
            if self.too_old(lease.oldest_version):
                # What was sampled is too old, so a recycled task starts from its prompt.
                self.settle(lease, RECYCLED if self.on_stale == "recycle" else "stale")

    def too_old(self, oldest_version: int) -> bool:
        """Whether a unit with such a token may no longer be trained on."""
        return is_stale(self.versions.lag(oldest_version), self.max_version_lag)

    def _nothing_comes(self) -> bool:
        ended = self.closed or (self._source_ended and not self.pool and not self.restored)
        return ended and self.ledger.count("admitted") == 0

    # ---------------------------------------------------------------------------------------------------- leases

    def mark_trained(self, leases: list[Lease]) -> None:
        for lease in leases:
            self.ledger.move(lease, "trained")

    def settle(self, lease: Lease, outcome: str, remainder: Any = None) -> bool:
        """End a lease and free its place. "recycled" puts its task, with the remainder, to the front of the pool."""
        had_unit = lease.state in ("ready", "taken")
        unit = self._read(lease) if had_unit and outcome != "lost" else None
        if not self.ledger.settle(lease, outcome):
            return False
        self.ready.pop(lease.lease_id, None)
        self.store.acknowledge(lease.lease_id)
        if outcome == RECYCLED and not self.closed:
            self.pool.appendleft((lease.task, remainder))
        elif outcome != TRAINED:
            self.source.give_back(lease.task, outcome)
        if outcome != TRAINED:
            self.on_drop(lease, outcome, unit)
        self.changed.fire()
        return True

    def close(self) -> None:
        """No more admissions. Wakes every waiter; what is in the pool goes back to the source."""
        self.closed = True
        while self.pool:
            self.source.give_back(self.pool.popleft()[0], "end")
        while self.restored:
            self.source.give_back(self.restored.popleft()[1], "end")
        self.changed.fire()
