"""The Store contract, over every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exchange.test_codec import assert_same
from headrace.errors import ConfigError
from headrace.exchange.stores import AVAILABLE, DURABLE, open_store
from headrace.protocols import Store
from headrace.types import (
    Episode,
    Group,
    SamplingParams,
    Score,
    Task,
    TokenSample,
    Trajectory,
)


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
        ended=np.array([[1, 0]], dtype=np.int64),
        final_observations={"camera": np.ones((1, 8), dtype=np.uint8)},
        initial_state={"h": np.zeros((2, 4), dtype=np.float32)},
        actions=grid,
        rewards=grid,
        terminated=grid.astype(bool),
        truncated=grid.astype(bool),
        valid=np.ones_like(grid, dtype=bool),
        behavior_logprobs=grid,
        policy_versions=grid.astype(np.int32),
    )


@pytest.fixture(params=AVAILABLE)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens stores of one kind, all of them on one folder or stream."""
    more = {"url": request.getfixturevalue("redis_server").url} if request.param == "redis" else {}
    stores = []

    def open_one(**options: Any) -> Store:
        stores.append(open_store(request.param, folder=str(tmp_path), **more, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def test_units_come_back_in_order_of_arrival_until_acknowledged(opened):
    store = opened()
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


def test_bytes_are_those_of_the_arrays(opened):
    store = opened()
    assert store.bytes() == 0
    store.append("g", group("g", tokens=1000))
    arrays = 1000 * (8 + 1 + 4 + 4)
    assert arrays <= store.bytes() < arrays + 1000
    store.append("t", trajectory("t", steps=50))
    steps = 51 * 2 * 8 + 50 * 2 * (4 + 4 + 1 + 1 + 1 + 4 + 4)
    assert arrays + steps <= store.bytes() < arrays + steps + 2500
    store.acknowledge("g")
    store.acknowledge("t")
    assert store.bytes() == 0


def test_appending_a_key_again_replaces_it(opened):
    store = opened()
    store.append("g", group("g", tokens=1000))
    store.append("g", group("g", tokens=10))
    assert store.scan() == ["g"] and store.read("g").episodes[0].samples[0].token_ids.size == 10
    assert store.bytes() < 2000


def test_a_bounded_store_reserves_the_largest_unit_so_that_append_never_passes_the_bound(opened):
    store = opened(max_bytes=100_000)
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


def test_a_unit_larger_than_the_bound_is_kept_and_stops_admission(opened):
    store = opened(max_bytes=1000)
    assert store.reserve("a")
    store.append("a", group("a", tokens=1000))
    assert store.read("a").group_id == "a"
    assert not store.reserve("b")
    store.acknowledge("a")
    assert store.reserve("b"), "or the run would never go on"


def test_every_kind_of_unit_comes_back_as_it_was(opened):
    store = opened()
    for name, unit in (("g", group("g")), ("t", trajectory("t", steps=5))):
        store.append(name, unit)
        assert_same(store.read(name), unit)
        assert_same(store.read(name), unit)  # a taken unit may be put back and read again


def test_what_was_put_is_there_when_the_store_is_opened_again(opened):
    first = opened()
    for name in "abcd":
        first.append(name, group(name))
    first.append("b", group("b", tokens=7))
    first.acknowledge("a")
    first.acknowledge("c")
    durable = first.acknowledged()
    assert durable in (["a", "c"], []) and first.scan() == ["d", "b"]
    first.forget(["a", "never stored"])
    first.close()
    if not durable:
        return
    second = opened()
    assert sorted(second.scan()) == ["b", "c", "d"], "no checkpoint has committed the end of c"
    assert second.read("b").episodes[0].samples[0].token_ids.size == 7
    second.append("e", group("e"))
    for name in second.scan():
        second.acknowledge(name)
    assert second.bytes() == 0 and second.scan() == []
    second.forget(second.acknowledged())
    second.close()
    assert opened().scan() == []


def test_durable_stores_say_so(opened):
    store = opened()
    store.append("a", group("a"))
    store.acknowledge("a")
    kind = type(store).__module__.rpartition(".")[2]
    assert bool(store.acknowledged()) == (kind in DURABLE)


def test_without_checkpoints_nothing_acknowledged_is_kept(opened):
    store = opened(keep_acknowledged=False)
    store.append("a", group("a"))
    store.acknowledge("a")
    assert store.acknowledged() == []
    store.close()
    assert opened().scan() == []


def test_other_kinds_name_those_available():
    with pytest.raises(ConfigError, match=r"buffer\.store: 'tape' is not available; choose one of memory"):
        open_store("tape")
    with pytest.raises(ConfigError, match="max_bytes"):
        open_store("memory", max_bytes=-1)
