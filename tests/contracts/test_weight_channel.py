"""The WeightChannel contract, over every channel, both ends in one process."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, PartFailed, StaleTicket
from headrace.exchange.channels import AVAILABLE, open_channel

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)


LEASED = ("in_process", "shared_memory")
"""Readers look at the publisher's own memory, so it has to ask them before it uses it again."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made = []

    def open_one(kind: str, **options: Any) -> Any:
        made.append(open_channel(kind, **{"lease_timeout_s": 0.05, "folder": str(tmp_path / "weights"), **options}))
        return made[-1]

    yield open_one
    for channel in made:
        channel.close()


@pytest.fixture(params=AVAILABLE)
def channel(request: pytest.FixtureRequest, opened: Callable[..., Any]) -> Any:
    return opened(request.param)


@pytest.fixture(params=LEASED)
def leased(request: pytest.FixtureRequest, opened: Callable[..., Any]) -> Any:
    return opened(request.param)


def policy(version: float, size: int = 1000) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{i}", torch.full((size + i,), float(version))) for i in range(3)]


def test_every_dtype_and_shape_comes_back(channel):
    generator = torch.Generator().manual_seed(0)
    sent = {}
    for dtype in DTYPES:
        for shape in ((), (1,), (3, 5), (0,), (4, 0, 2), (129,)):
            sent[f"{dtype}{shape}"] = (torch.rand(shape, generator=generator) * 100).to(dtype)
    sent["transposed"] = torch.arange(12.0).view(3, 4).T
    sent["strided"] = torch.arange(20.0)[::3]
    sent["expanded"] = torch.tensor([7.0]).expand(5)
    sent["parameter"] = torch.nn.Parameter(torch.ones(3))
    ticket = channel.publish(iter(sent.items()), 1)
    received = channel.read(ticket)
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape, name
        assert torch.equal(received[name], tensor.detach()), name
    assert ticket.version == 1 and ticket.policy == "main" and ticket.checksum
    assert ticket.bytes >= sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
    channel.release(ticket)


def test_nothing_to_send_is_a_version_too(channel):
    assert dict(channel.read(channel.publish([], 3))) == {}


def test_the_publisher_may_change_its_tensors_at_once(channel):
    tensor = torch.zeros(10)
    ticket = channel.publish([("w", tensor)], 1)
    tensor.fill_(9)
    assert channel.read(ticket)["w"].sum() == 0


def test_reading_makes_no_copy(leased):
    channel = leased
    ticket = channel.publish(policy(1), 1)
    first, second = channel.read(ticket), channel.read(ticket)
    assert first["layer.1"].data_ptr() == second["layer.1"].data_ptr()


def test_views_stay_valid_until_release_whatever_is_published(channel):
    ticket = channel.publish(policy(1), 1)
    held = channel.read(ticket)
    for version in range(2, 8):
        channel.publish(policy(version), version)
        assert all(bool((tensor == 1).all()) for tensor in held.values())
    channel.release(ticket)
    channel.release(ticket)


def test_memory_is_left_once_to_a_reader_that_does_not_release(leased):
    ticket = leased.publish(policy(1), 1)
    leased.read(ticket)
    for version in range(2, 8):
        leased.publish(policy(version), version)
    assert leased.reclaimed == 1, "the two others serve all later versions"


def test_a_copy_is_left_to_its_reader_as_long_as_it_is_held(channel):
    held = []
    for version in range(1, 6):
        ticket = channel.publish(policy(version), version)
        held.append(channel.read(ticket))
    for version, tensors in enumerate(held, start=1):
        assert all(bool((tensor == version).all()) for tensor in tensors.values())


def test_released_slots_are_used_again(leased):
    channel = leased
    addresses = set()
    for version in range(1, 9):
        ticket = channel.publish(policy(version), version)
        addresses.add(channel.read(ticket)["layer.0"].data_ptr())
        channel.release(ticket)
    assert len(addresses) == 2 and channel.reclaimed == 0


def test_two_reads_need_two_releases(channel):
    ticket = channel.publish(policy(1), 1)
    channel.read(ticket)
    held = channel.read(ticket)
    channel.release(ticket)
    channel.publish(policy(2), 2)
    channel.publish(policy(3), 3)
    assert bool((held["layer.0"] == 1).all())


def test_versions_only_grow(channel):
    channel.publish(policy(5), 5)
    for version in (5, 4, 0):
        with pytest.raises(StaleTicket):
            channel.publish(policy(version), version)
    assert channel.latest().version == 5
    channel.publish(policy(9), 9)  # numbers may be skipped


def test_the_previous_version_is_still_there_and_the_one_before_is_not(channel):
    tickets = [channel.publish(policy(version), version) for version in (1, 2, 3)]
    assert channel.read(tickets[1])["layer.0"][0] == 2
    channel.release(tickets[1])
    with pytest.raises(StaleTicket):
        channel.read(tickets[0])


def test_policies_do_not_disturb_each_other(channel):
    red = channel.publish(policy(1), 1, policy="red")
    for version in range(1, 5):
        channel.publish(policy(-version), version, policy="blue")
    assert channel.read(red)["layer.0"][0] == 1
    assert channel.latest("blue").version == 4 and channel.latest("red") == red


def test_latest_is_none_at_first(channel):
    assert channel.latest() is None
    ticket = channel.publish(policy(1), 1)
    assert channel.latest() == ticket


def test_a_policy_may_grow_and_shrink(channel):
    for version, size in enumerate((10, 300_000, 20, 400_000, 1), start=1):
        ticket = channel.publish(policy(version, size), version)
        read = channel.read(ticket)
        assert [tensor.numel() for tensor in read.values()] == [size, size + 1, size + 2]
        assert all(bool((tensor == version).all()) for tensor in read.values())
        channel.release(ticket)


def published_bytes(channel: Any) -> Any:
    """The newest version's bytes, to be changed: a tensor, a mapping or a file."""
    if hasattr(channel, "_folder"):
        path = sorted((channel._folder / "main").glob("*.safetensors"))[-1]
        return np.memmap(path, dtype=np.uint8, mode="r+", offset=path.stat().st_size - 12_012)
    slots = getattr(channel, "_published", channel._slots if hasattr(channel, "_slots") else None)
    slot = (slots._slots if hasattr(slots, "_slots") else slots)["main"][-1]
    if hasattr(slot, "memory"):
        return slot.memory.numpy()
    return np.frombuffer(slot._map, dtype=np.uint8, offset=slot._start)


@pytest.mark.parametrize("size", [1000, 6_000_000])
def test_changed_bytes_are_refused(channel, size):
    ticket = channel.publish(policy(1, size), 1)
    changed = published_bytes(channel)
    changed[: (1 << 20)] ^= 1
    del changed
    with pytest.raises(PartFailed, match="checksum"):
        channel.read(ticket)
    good = channel.publish(policy(2, size), 2)
    assert channel.read(good)["layer.0"][0] == 2, "and nothing stays leased or broken"
    assert channel.reclaimed == 0


def test_a_publish_that_fails_leaves_the_last_version_readable(channel):
    ticket = channel.publish(policy(1), 1)
    channel.publish(policy(2), 2)

    def failing():
        yield "w", torch.ones(3)
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError):
        channel.publish(failing(), 3)
    assert channel.latest().version == 2
    assert channel.read(channel.latest())["layer.0"][0] == 2
    assert channel.read(ticket)["layer.0"][0] == 1
    assert channel.publish(policy(3), 3).version == 3


@pytest.mark.parametrize("other", AVAILABLE)
def test_a_ticket_of_somewhere_else_is_refused(channel, opened, other, tmp_path):
    stranger = opened(other, folder=str(tmp_path / "elsewhere"))
    ticket = stranger.publish(policy(7), 7)
    if type(stranger) is not type(channel):
        with pytest.raises(PartFailed):
            channel.read(ticket)
    stranger.close()
    if other != "filesystem":  # whose files outlive their publisher
        with pytest.raises(PartFailed):
            channel.read(ticket)


@pytest.mark.parametrize(
    "locator", ["", "x", "http://127.0.0.1:1/weights/main/1", "file:///dev/null", "ipc:{}", "memfd:1:2:ab"]
)
def test_a_ticket_that_names_nothing_is_refused(channel, locator):
    good = channel.publish(policy(1), 1)
    with pytest.raises(PartFailed):
        channel.read(dataclasses.replace(good, version=2, locator=locator))
    assert channel.read(good)["layer.0"][0] == 1


def test_a_ticket_with_other_facts_is_refused(channel):
    good = channel.publish(policy(1), 1)
    for wrong in ({"version": 2}, {"checksum": "00"}, {"policy": "red"}):
        with pytest.raises(PartFailed):
            channel.read(dataclasses.replace(good, **wrong))
    assert channel.read(good)["layer.0"][0] == 1


@pytest.mark.parametrize("kind", [kind for kind in AVAILABLE if kind != "in_process"])
def test_the_object_travels_and_its_copy_reads(kind, opened):
    here = opened(kind)
    there = pickle.loads(pickle.dumps(here))
    for version in (1, 2, 3):
        ticket = here.publish(policy(version), version)
        assert there.read(ticket)["layer.2"][0] == version and there.latest() == ticket
        there.release(ticket)
    with pytest.raises(PartFailed, match="another process publishes"):
        there.publish(policy(9), 9)
    here.close()
    assert there.publish(policy(9), 9).version == 9, "the publisher has gone: another may take its place"
    there.close()


def test_other_kinds_name_those_available():
    with pytest.raises(ConfigError, match=r"weights\.channel: 'pigeon' is not available; choose one of in_process"):
        open_channel("pigeon")
