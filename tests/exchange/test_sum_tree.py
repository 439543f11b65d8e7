"""Draws by the tree of sums against the running sum itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.exchange.sum_tree import SumTree

weights = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(first=weights, changes=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 5)), max_size=30))
def test_a_point_finds_the_slot_that_the_running_sum_says(first, changes):
    naive = np.array(first, dtype=float)
    tree = SumTree(len(first))
    tree[np.arange(len(first))] = naive
    for slot, weight in changes:
        naive[slot % len(first)] = weight
        tree[np.array([slot % len(first)])] = float(weight)
    assert tree.total == naive.sum()
    if tree.total:
        points = np.linspace(0, tree.total, 200, endpoint=False)
        np.testing.assert_array_equal(tree.find(points), np.searchsorted(np.cumsum(naive), points, side="right"))
    np.testing.assert_array_equal(tree[np.arange(len(first))], naive)


def test_of_a_slot_named_twice_the_last_weight_holds():
    tree = SumTree(5)
    tree[np.array([3, 1, 3])] = np.array([9.0, 2.0, 4.0])
    assert tree.total == 6.0 and tree[np.array([3])].tolist() == [4.0]


@pytest.mark.parametrize("capacity", [1, 2, 3, 1000])
def test_rounding_never_finds_a_slot_without_weight(capacity):
    rng = np.random.default_rng(capacity)
    tree = SumTree(capacity)
    held = np.where(rng.random(capacity) < 0.5, 0.0, rng.random(capacity) * 10.0 ** rng.integers(-12, 3, capacity))
    held[0] = 0.1
    tree[np.arange(capacity)] = held
    found = tree.find(np.nextafter(np.full(3, tree.total), 0) * np.array([1.0, 0.999999, 0.5]))
    assert (held[found] > 0).all()


def test_draws_follow_the_weights():
    held, rng = np.array([1.0, 0.0, 3.0, 4.0]), np.random.default_rng(0)
    tree = SumTree(4)
    tree[np.arange(4)] = held
    counts = np.bincount(tree.find(rng.random(80_000) * tree.total), minlength=4)
    np.testing.assert_allclose(counts / 80_000, held / 8, atol=0.006)
