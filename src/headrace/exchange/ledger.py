"""Every lease's walk through the flow into counts that must add up.

States and legal steps (a lease ends exactly once, by `settle`)::

    admitted ──put──▶ ready ──take──▶ taken ──train──▶ trained ──settle──▶ settled("trained")
       │                │  ◀─untake──    │
       └── dropped or recycled ──────────┘            (cancelling is legal only before `taken`)

Law 1: submitted = trained + dropped (by reason) + in flight, where in flight is *counted* by asking the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.errors import ConservationError
from headrace.protocols import Lease

TRAINED = "trained"
RECYCLED = "recycled"

_LEGAL = {
    "admitted": {"ready", "settled"},
    "ready": {"taken", "settled"},
    "taken": {"trained", "ready", "settled"},
    "trained": {"settled"},
    "settled": set(),
}
FILTERS = {"filtered", "end", "stale", "error"}
"""Outcomes that may still end a lease whose unit is taken: the trainer's own filters, never a cancellation."""


class Ledger:
    """Counts of all leases and the state of those in flight."""

    def __init__(self) -> None:
        self.submitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_since_trained: Counter[str] = Counter()
        self.ignored_settles = 0
        self.transitions = 0
        self.in_flight: dict[str, Lease] = {}
        self._by_state: Counter[str] = Counter()

    def admit(self, lease: Lease) -> None:
        if lease.lease_id in self.in_flight:
            raise ConservationError(f"lease {lease.lease_id} was admitted twice", [lease.lease_id])
        self.submitted += 1
        self.transitions += 1
        self.in_flight[lease.lease_id] = lease
        self._by_state[lease.state] += 1

    def move(self, lease: Lease, state: str) -> None:
        """Take one legal step. Raises `ConservationError` for any other."""
        if state not in _LEGAL[lease.state]:
            raise ConservationError(f"lease {lease.lease_id} cannot go from {lease.state} to {state}", [lease.lease_id])
        self._by_state[lease.state] -= 1
        self._by_state[state] += 1
        lease.state = state  # type: ignore[assignment]
        self.transitions += 1

    def settle(self, lease: Lease, outcome: str) -> bool:
        """End a lease; the first settle wins. Raises `ConservationError` for an outcome that its state does not allow."""
        if lease.state == "settled":
            self.ignored_settles += 1
            return False
        if lease.state == "taken" and outcome not in FILTERS:
            raise ConservationError(
                f"lease {lease.lease_id} is taken and cannot end as {outcome!r}: cancelling is legal only before",
                [lease.lease_id],
            )
        if (outcome == TRAINED) != (lease.state == "trained"):
            raise ConservationError(
                f"lease {lease.lease_id} is {lease.state} and cannot end as {outcome!r}", [lease.lease_id]
            )
        self.move(lease, "settled")
        lease.outcome = outcome
        del self.in_flight[lease.lease_id]
        self._by_state["settled"] -= 1
        if outcome == TRAINED:
            self.trained += 1
            self.dropped_since_trained.clear()
        else:
            self.dropped[outcome] += 1
            self.dropped_since_trained[outcome] += 1
        return True

    def count(self, *states: str) -> int:
        """Leases in flight that are in one of the states."""
        return sum(self._by_state[state] for state in states)

    def check(self, found: Iterable[str]) -> None:
        """Hold the ids that the parts say they have against the ledger. Raises `ConservationError` naming the ids.

        `found` is asked in the order of the flow, with no transition in between, so an id on its way is seen.
        """
        seen = Counter(found)
        missing = [lease_id for lease_id in self.in_flight if not seen[lease_id]]
        unknown = [lease_id for lease_id in seen if lease_id not in self.in_flight]
        twice = [lease_id for lease_id, times in seen.items() if times > 1]
        total = self.trained + sum(self.dropped.values()) + len(seen)
        if missing or unknown or twice or total != self.submitted:
            raise ConservationError(
                f"submitted {self.submitted} is not trained {self.trained} + dropped {dict(self.dropped)} + in flight "
                f"{len(seen)}; missing {missing}, unknown {unknown}, twice {twice}",
                missing + unknown + twice,
            )

    def state(self, kept: int = 0) -> dict[str, object]:
        """Counts to restore from. A trained lease counts as trained: the first publish of a restored run makes it live; but
        for `kept` of them, which are restored with their units."""
        return {"trained": self.trained + self.count("trained") - kept, "dropped": dict(self.dropped)}

    def restore(self, state: dict[str, object]) -> None:
        """Counts of an earlier incarnation; leases still in flight there are admitted anew by the buffer, so they are
        taken off here."""
        self.trained = int(state["trained"])  # type: ignore[call-overload]
        self.dropped = Counter(state["dropped"])  # type: ignore[arg-type]
        self.submitted = self.trained + sum(self.dropped.values())
