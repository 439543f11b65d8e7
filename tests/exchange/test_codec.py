"""Units into bytes and back; bytes that are none; files that a kill has torn."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exchange.units import group
from headrace.errors import DataError
from headrace.exchange.codec import GroupWriter, decode_group, decode_task, encode, read_groups
from headrace.types import SamplingMask, Score, Task


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    if dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted or (found != found and wanted != wanted)


def test_a_group_comes_back_as_it_was():
    made = group("a", version=3, members=2)
    sample = dataclasses.replace(
        made.episodes[0].samples[0],
        behavior_logprobs=np.array([-np.inf, np.nan, -0.5, 0.0], np.float32),
        sampling_mask=SamplingMask(token_ids=np.array([1, 2], np.int32), offsets=np.array([0, 2], np.int64)),
        expert_routing=np.zeros((4, 2, 2), np.uint8),
    )
    episode = dataclasses.replace(made.episodes[0], samples=(sample,))
    scores = (Score(reward=None, error="hangs"), Score(reward=0.5, per_token=np.ones(4, np.float32)))
    made = dataclasses.replace(made, episodes=(episode, made.episodes[1]), scores=scores)
    assert_same(decode_group(encode(made)), made)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_a_task_keeps_any_payload_of_plain_data(value):
    task = Task(task_id="a", source="b", payload={"prompt": "x", "column": value})
    assert decode_task(encode(task)) == task


@given(st.binary(max_size=40))
def test_bytes_that_are_no_group_are_refused_with_one_error(data):
    with pytest.raises(DataError, match="not a scored group"):
        decode_group(data)


def test_an_array_of_objects_is_never_read():
    tampered = msgspec.msgpack.decode(encode(group("a")))
    tampered["episodes"][0]["samples"][0]["token_ids"]["dtype"] = "|O"
    with pytest.raises(DataError):
        decode_group(msgspec.msgpack.encode(tampered))


def test_files_of_groups_forgive_a_torn_last_record(tmp_path):
    writer = GroupWriter(tmp_path / "in" / "a.groups")
    sizes = [writer.write(group(name)) for name in "xyz"]
    writer.close()
    path = tmp_path / "in" / "a.groups"
    assert path.stat().st_size == sum(sizes) + 3 * 8
    assert [found.group_id for found in read_groups(path)] == ["x", "y", "z"]
    whole = path.read_bytes()
    for cut in (1, sizes[-1], sizes[-1] + 3, sizes[-1] + 8):
        path.write_bytes(whole[:-cut])
        assert [found.group_id for found in read_groups(path)] == ["x", "y"]
    second = GroupWriter(tmp_path / "in" / "b.groups")
    second.write(group("w"))
    second.close()
    assert [found.group_id for found in read_groups(tmp_path / "in")] == ["x", "y", "w"], "files in order of name"


def test_a_folder_without_groups_says_how_to_make_some(tmp_path):
    with pytest.raises(DataError, match="--only rollout"):
        list(read_groups(tmp_path))
