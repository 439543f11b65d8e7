"""Versions and policy into three answers: how old is a unit, may it still be trained on, how many leases may be held.

The capacity formula (leases are held from admission until the weights trained on them are live)::

    room = min(max_in_flight - running, (1 + ahead) * batch + oversample - held)

`ahead` is the tightest of the buffer's depth (none 0, double 1, queue K, stream unbounded) and `max_steps_ahead`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types import NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many leases may be held and how many may run, in units."""

    batch: int
    ahead: int | None
    """`exchange.config.steps_ahead`; None (a stream): no bound."""
    oversample: int = 0
    max_in_flight: int = 0
    """0: no bound of its own; a stream then runs two batches at once."""

    def room(self, *, running: int, held: int) -> int:
        """Leases that may be admitted now; never negative (a restored run may hold more than the bound, and drains)."""
        bounds = []
        if self.ahead is not None:
            bounds.append((1 + self.ahead) * self.batch + self.oversample - held)
        if self.max_in_flight:
            bounds.append(self.max_in_flight - running)
        elif self.ahead is None:
            bounds.append(2 * self.batch + self.oversample - running)
        return max(0, min(bounds))


@dataclass(slots=True)
class VersionLine:
    """The version numbers of one policy over all incarnations of a run.

    A restored run goes on at the highest number ever written + 1, so that a number never names two contents. The numbers
    between the checkpoint and that one name lost weights: they do not count as lag, and a unit that carries one of them
    counts as one trained batch older than the checkpoint.
    """

    version: int = 0
    restarts: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (checkpoint's version, number that the restored run published it under), ascending."""

    def advance(self) -> int:
        self.version += 1
        return self.version

    def restore(self, highest_written: int) -> None:
        """Continue after `highest_written`, a number at or above the checkpoint's `version`."""
        restart = max(highest_written, self.version) + 1
        self.restarts.append((self.version, restart))
        self.version = restart

    def position(self, version: int) -> int:
        """Trained batches that `version` stands for."""
        skipped = 0
        for checkpoint, restart in self.restarts:
            if version >= restart:
                skipped += restart - checkpoint
            elif version > checkpoint:
                return checkpoint - skipped - 1
        return version - skipped

    def lag(self, oldest_version: int) -> int:
        """Trained batches between a unit's oldest sampled token and the trainer; 0 for a unit without sampled tokens."""
        if oldest_version == NO_VERSION:
            return 0
        return max(0, self.position(self.version) - self.position(oldest_version))


def is_stale(lag: int, max_version_lag: int | None) -> bool:
    """Whether a unit of this lag may no longer be trained on."""
    return max_version_lag is not None and lag > max_version_lag
