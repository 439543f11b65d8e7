"""Turns weights of slots into draws in proportion to them, in logarithmic time: many slots a call."""

from __future__ import annotations

import numpy as np

from headrace.types import Array


class SumTree:
    """A binary tree of sums over `capacity` slots, all 0 at first. Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1.

    A parent is always the sum of its children as they stand, so that rounding errors never add up.
    """

    def __init__(self, capacity: int) -> None:
        self._leaves = 1 << max(0, capacity - 1).bit_length()
        self._sums = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    def __getitem__(self, slots: Array) -> Array:
        return self._sums[self._leaves + slots]

    def __setitem__(self, slots: Array, weights: Array | float) -> None:
        """slots: [K]; of a slot named twice the last weight holds."""
        nodes = self._leaves + slots
        self._sums[nodes] = weights
        while nodes.size and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, points: Array) -> Array:
        """[B] the slots in whose span of the running sum the points lie, 0 <= point < total; never one of weight 0."""
        nodes, points = np.ones(points.shape, dtype=np.int64), points.copy()
        for _ in range(self._leaves.bit_length() - 1):
            left, right = self._sums[2 * nodes], self._sums[2 * nodes + 1]
            # By rounding a point can lie at the very end of a sum: it must not fall into a part that holds nothing.
            goes_right = (points >= left) & (right > 0)
            points = np.where(goes_right, points - left, points)
            nodes = 2 * nodes + goes_right
        return nodes - self._leaves
