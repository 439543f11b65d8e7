"""The Store contract, over every store."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.exchange.stores import AVAILABLE, open_store
from headrace.types import Episode, Group, SamplingParams, Score, Task, TokenSample, Trajectory


def group(name: str, tokens: int = 100) -> Group:
    sample = TokenSample(
        sample_id=f"{name}/0",
        token_ids=np.arange(tokens, dtype=np.int64),
        loss_mask=np.ones(tokens, dtype=np.int8),
        behavior_logprobs=np.zeros(tokens, dtype=np.float32),
        policy_versions=np.zeros(tokens, dtype=np.int32),
        sampling=SamplingParams(),
        finish_reason="stop",
    )
    task = Task(task_id=name, source="test", payload={"prompt": "1 + 1 ="})
    return Group(
        group_id=name,
        task=task,
        expected_size=1,
        episodes=(Episode(episode_id=name, samples=(sample,)),),
        scores=(Score(reward=1.0),),
    )


def trajectory(name: str, steps: int) -> Trajectory:
    grid = np.zeros((steps, 2), dtype=np.float32)
    return Trajectory(
        sample_id=name,
        observations={"camera": np.zeros((steps + 1, 2, 8), dtype=np.uint8)},
        actions=grid,
        rewards=grid,
        terminated=grid.astype(bool),
        truncated=grid.astype(bool),
        valid=np.ones_like(grid, dtype=bool),
        behavior_logprobs=grid,
        policy_versions=grid.astype(np.int32),
    )


@pytest.fixture(params=AVAILABLE)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_units_come_back_in_order_of_arrival_until_acknowledged(kind, tmp_path):
    store = open_store(kind, folder=str(tmp_path))
    for name in ("b", "a", "c"):
        assert store.reserve(name)
        store.append(name, group(name))
    assert store.scan() == ["b", "a", "c"]
    assert store.read("a").group_id == "a"
    np.testing.assert_array_equal(store.read("a").episodes[0].samples[0].token_ids, np.arange(100))
    store.acknowledge("b")
    store.acknowledge("never stored")
    assert store.scan() == ["a", "c"]
    with pytest.raises(KeyError):
        store.read("b")
    store.close()


def test_bytes_are_those_of_the_arrays(kind, tmp_path):
    store = open_store(kind, folder=str(tmp_path))
    assert store.bytes() == 0
    store.append("g", group("g", tokens=1000))
    arrays = 1000 * (8 + 1 + 4 + 4)
    assert arrays <= store.bytes() < arrays + 500
    store.append("t", trajectory("t", steps=50))
    steps = 51 * 2 * 8 + 50 * 2 * (4 + 4 + 1 + 1 + 1 + 4 + 4)
    assert arrays + steps <= store.bytes() < arrays + steps + 1000
    store.acknowledge("g")
    store.acknowledge("t")
    assert store.bytes() == 0


def test_appending_a_key_again_replaces_it(kind, tmp_path):
    store = open_store(kind, folder=str(tmp_path))
    store.append("g", group("g", tokens=1000))
    store.append("g", group("g", tokens=10))
    assert store.scan() == ["g"] and store.read("g").episodes[0].samples[0].token_ids.size == 10
    assert store.bytes() < 1000


def test_a_bounded_store_reserves_the_largest_unit_so_that_append_never_passes_the_bound(kind, tmp_path):
    store = open_store(kind, max_bytes=100_000, folder=str(tmp_path))
    assert store.reserve("first"), "one unit is always let in"
    store.append("first", group("first", tokens=1000))  # 17 kB and a little
    admitted = [name for name in (f"u{i}" for i in range(50)) if store.reserve(name)]
    assert len(admitted) == 4, "five units of 17 kB fit"
    for name in admitted:
        store.append(name, group(name, tokens=1000))
        assert store.bytes() <= 100_000
    assert not store.reserve("more")
    store.acknowledge("first")
    assert store.reserve("more") and store.reserve("more"), "asking again for the same key changes nothing"
    assert not store.reserve("yet more")
    store.acknowledge("more")  # its lease was cancelled before the unit came
    assert store.reserve("yet more")


def test_a_unit_larger_than_the_bound_is_kept_and_stops_admission(kind, tmp_path):
    store = open_store(kind, max_bytes=1000, folder=str(tmp_path))
    assert store.reserve("a")
    store.append("a", group("a", tokens=1000))
    assert store.read("a").group_id == "a"
    assert not store.reserve("b")
    store.acknowledge("a")
    assert store.reserve("b"), "or the run would never go on"


def test_other_kinds_name_those_available():
    with pytest.raises(ConfigError, match=r"buffer\.store: 'redis' is not available; choose one of memory"):
        open_store("redis")
    with pytest.raises(ConfigError, match="max_bytes"):
        open_store("memory", max_bytes=-1)
