"""Keeps the latest trajectories in two rings, of steps and of observations, and draws transitions from them.

A step's facts lie in the ring of steps; an observation lies once in the ring of rows, however many steps refer to it. Steps
have serial numbers that are never given twice; serial modulo capacity is a step's slot. The oldest unit makes room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.exchange.stores.memory import unit_bytes
from headrace.exchange.sum_tree import SumTree
from headrace.types import Array, Trajectory, Transitions

FACTS = ("actions", "rewards", "terminated", "truncated", "valid", "behavior_logprobs", "policy_versions")
KEPT = ("sample_id", "ended", "episode_returns", "episode_lengths", "initial_state", "policy", "group_id")
"""What a unit holds beside its rows and steps."""


@dataclass(slots=True, eq=False)
class Resident:
    """Where one unit lies: `steps` serials from `first`, `rows` rows from `first_row`; `uses` is set when it is evicted."""

    key: str
    shape: tuple[int, int]
    first: int
    first_row: int
    rows: int
    oldest_version: int
    nbytes: int
    kept: dict[str, Any]
    uses: int = 0
    gone: bool = False

    @property
    def steps(self) -> int:
        return self.shape[0] * self.shape[1]


class ReplayStore:
    """A `Store` of trajectories that refuses none: it evicts the oldest.

    capacity: steps kept, all environments counted; drawable: steps held that can be drawn
    exponent: 0 draws uniformly; above, a step is drawn in proportion to |error| ** exponent, a new one like the largest so
    far. Schaul et al. 2016, arXiv:1511.05952
    on_evict(resident): told while its bytes are still there
    """

    def __init__(self, capacity: int, *, exponent: float = 0.0, smallest: float = 1e-6, seed: int = 0) -> None:
        self.capacity, self.exponent, self.smallest = capacity, exponent, smallest
        self.on_evict: Callable[[Resident], None] = lambda resident: None
        self.stored = self.evicted = 0
        self._rng = np.random.default_rng(seed)
        self._tree = SumTree(capacity)
        self._largest_error = 1.0
        self._order: deque[Resident] = deque()
        """Oldest first; those acknowledged out of turn stay in it, as their place is free only once it is the oldest."""
        self._residents: dict[str, Resident] = {}
        self.drawable = self._next = self._next_row = self._row_capacity = 0
        self._facts: dict[str, Array] = {}
        self._rows: dict[str, Array] = {}
        self._serials = np.full(capacity, -1, dtype=np.int64)
        self._uses = np.zeros(capacity, dtype=np.int64)
        self._own_row, self._next_row_of = np.zeros((2, capacity), dtype=np.int64)
        self._stride, self._left = np.zeros((2, capacity), dtype=np.int32)
        """Serials from a step to its environment's next; steps of its environment from it to the unit's end."""

    # ----------------------------------------------------------------------------------------------- as a store

    def reserve(self, key: str) -> bool:
        """Always: what is oldest makes room."""
        return True

    def append(self, key: str, unit: Trajectory) -> None:
        """Store the unit, in place of an earlier one of this key, after evicting as many as it takes."""
        steps, envs = unit.rewards.shape
        rows = (steps + 1) * envs + len(unit.ended)
        if steps * envs > self.capacity:
            problem = f"{self.capacity} steps do not hold one unit of {steps} x {envs} steps: raise it"
            raise ConfigError("replay.capacity", problem)
        self.acknowledge(key)
        if not self._facts:
            self._allocate(unit, rows)
        self._make_room(steps * envs, rows)
        resident = Resident(
            key=key,
            shape=(steps, envs),
            first=self._next,
            first_row=self._next_row,
            rows=rows,
            oldest_version=unit.oldest_version,
            nbytes=unit_bytes(unit),
            kept={name: getattr(unit, name) for name in KEPT},
        )
        self._write(resident, unit)
        self._order.append(resident)
        self._residents[key] = resident
        self._next, self._next_row = self._next + steps * envs, self._next_row + rows
        self.stored += 1

    def read(self, key: str) -> Trajectory:
        """A copy of the unit, put together again."""
        resident = self._residents[key]
        steps, envs = resident.shape
        grid, (borders, finals) = self._slots(resident).reshape(steps, envs), self._split_rows(resident)
        return Trajectory(
            observations=self._observations(borders),
            final_observations=self._observations(finals) if finals.size else {},
            **{name: ring[grid] for name, ring in self._facts.items()},
            **resident.kept,
        )

    def acknowledge(self, key: str) -> None:
        """Forget the unit. Its place is used again when it is the oldest."""
        resident = self._residents.pop(key, None)
        if resident is None:
            return
        slots = self._slots(resident)
        resident.gone = True
        self.drawable -= int(np.count_nonzero(self._tree[slots]))
        self._tree[slots] = 0.0
        self.evicted += 1
        while self._order and self._order[0].gone:
            self._order.popleft()

    def acknowledged(self) -> list[str]:
        """None: what is acknowledged is gone."""
        return []

    def forget(self, keys: Sequence[str]) -> None:
        """See `acknowledged`."""

    def scan(self) -> list[str]:
        return list(self._residents)

    def bytes(self) -> int:
        return sum(resident.nbytes for resident in self._residents.values())

    def close(self) -> None:
        for key in self.scan():
            self.acknowledge(key)
        self._facts, self._rows = {}, {}

    # ---------------------------------------------------------------------------------------------- as a replay

    def __contains__(self, key: str) -> bool:
        return key in self._residents

    def uses(self, key: str) -> int:
        """How often steps of a resident unit were drawn."""
        return int(self._uses[self._slots(self._residents[key])].sum())

    def residents(self) -> list[Resident]:
        """Oldest first."""
        return list(self._residents.values())

    def evict(self, resident: Resident) -> None:
        resident.uses = self.uses(resident.key)
        self.on_evict(resident)
        self.acknowledge(resident.key)

    def draw(self, size: int, n_steps: int = 1, importance: float = 0.0) -> Transitions:
        """`size` transitions over up to `n_steps` steps, one from each of `size` equal parts of the priorities' sum.

        importance: beta of the weights (N P(i)) ** -beta, divided by the largest of the draw
        """
        if not self.drawable:
            raise ValueError("nothing to draw from: the replay holds no valid step")
        points = (np.arange(size) + self._rng.random(size)) * (self._tree.total / size)
        slots = self._tree.find(points)
        np.add.at(self._uses, slots, 1)
        path, steps = self._follow(slots, n_steps)
        last = path[np.arange(size), steps - 1]
        counted = np.arange(n_steps) < steps[:, None]
        weights = (self.drawable * self._tree[slots] / self._tree.total) ** -importance
        return Transitions(
            observations=self._observations(self._own_row[slots]),
            actions=self._facts["actions"][slots],
            rewards=np.where(counted, self._facts["rewards"][path], 0.0).astype(np.float32),
            steps=steps,
            terminated=self._facts["terminated"][last],
            next_observations=self._observations(self._next_row_of[last]),
            weights=(weights / weights.max()).astype(np.float32),
            serials=self._serials[slots],
            policy_versions=self._facts["policy_versions"][slots],
        )

    def reprioritise(self, serials: Array, errors: Array) -> None:
        """[B] errors of steps that were drawn; those evicted since, and errors that are no numbers, change nothing."""
        slots = serials % self.capacity
        known = (self._serials[slots] == serials) & (self._tree[slots] > 0) & np.isfinite(errors)
        if not self.exponent or not known.any():
            return
        sizes = np.abs(errors[known]).astype(np.float64) + self.smallest
        self._largest_error = max(self._largest_error, float(sizes.max()))
        self._tree[slots[known]] = sizes**self.exponent

    def _follow(self, slots: Array, n_steps: int) -> tuple[Array, Array]:
        """[B, n] slots of a step and those after it, and [B] how many belong to its episode and its unit."""
        path = (slots[:, None] + self._stride[slots, None] * np.arange(n_steps)) % self.capacity
        goes_on = np.arange(1, n_steps) < self._left[slots, None]
        ended = self._facts["terminated"][path[:, :-1]] | self._facts["truncated"][path[:, :-1]]
        goes_on &= np.logical_and.accumulate(~ended, axis=1)
        return path, 1 + goes_on.sum(axis=1)

    # ------------------------------------------------------------------------------------------------ the rings

    def _allocate(self, unit: Trajectory, rows: int) -> None:
        """Rings in the shapes of the first unit. Later ones may have other numbers of steps, so rows get a tenth more."""
        steps = unit.rewards.shape[0]
        self._row_capacity = math.ceil(self.capacity * (steps + 1) / steps * 1.1) + rows
        self._rows = {name: _ring(leaf, self._row_capacity) for name, leaf in unit.observations.items()}
        self._facts = {name: _ring(getattr(unit, name), self.capacity) for name in FACTS}

    def _make_room(self, steps: int, rows: int) -> None:
        while self._order:
            oldest = self._order[0]
            if (
                self._next + steps - oldest.first <= self.capacity
                and self._next_row + rows - oldest.first_row <= self._row_capacity
            ):
                return
            self.evict(oldest)

    def _write(self, resident: Resident, unit: Trajectory) -> None:
        (steps, envs), slots = resident.shape, self._slots(resident)
        grid, (borders, finals) = slots.reshape(steps, envs), self._split_rows(resident)
        for name, ring in self._rows.items():
            ring[borders] = unit.observations[name]
            if finals.size:
                ring[finals] = unit.final_observations[name]
        for name, fact in self._facts.items():
            fact[grid] = getattr(unit, name)
        self._serials[slots] = resident.first + np.arange(resident.steps)
        self._own_row[grid], self._next_row_of[grid] = borders[:-1], borders[1:]
        self._next_row_of[grid[tuple(unit.ended.T)]] = finals
        self._stride[slots], self._uses[slots] = envs, 0
        self._left[grid] = np.arange(steps, 0, -1)[:, None]
        self._tree[slots] = np.where(unit.valid.reshape(-1), self._largest_error**self.exponent, 0.0)
        self.drawable += int(np.count_nonzero(unit.valid))

    def _observations(self, rows: Array) -> dict[str, Array]:
        return {name: ring[rows] for name, ring in self._rows.items()}

    def _slots(self, resident: Resident) -> Array:
        return (resident.first + np.arange(resident.steps)) % self.capacity

    def _split_rows(self, resident: Resident) -> tuple[Array, Array]:
        """[T+1, N] slots of the observations, and those of the final observations."""
        rows = (resident.first_row + np.arange(resident.rows)) % self._row_capacity
        steps, envs = resident.shape
        return rows[: (steps + 1) * envs].reshape(steps + 1, envs), rows[(steps + 1) * envs :]


def _ring(leaf: Array, capacity: int) -> Array:
    """Room for `capacity` items of a [T, N, ...] leaf."""
    return np.zeros((capacity, *leaf.shape[2:]), dtype=leaf.dtype)
