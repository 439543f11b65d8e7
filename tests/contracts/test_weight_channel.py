"""The WeightChannel contract, over every channel, both ends in one process."""

from __future__ import annotations

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


@pytest.fixture(params=AVAILABLE)
def channel(request: pytest.FixtureRequest):
    opened = open_channel(request.param, lease_timeout_s=0.05)
    yield opened
    opened.close()


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


def test_reading_makes_no_copy(channel):
    ticket = channel.publish(policy(1), 1)
    first, second = channel.read(ticket), channel.read(ticket)
    assert first["layer.1"].data_ptr() == second["layer.1"].data_ptr()


def test_views_stay_valid_until_release_whatever_is_published(channel):
    ticket = channel.publish(policy(1), 1)
    held = channel.read(ticket)
    for version in range(2, 8):
        channel.publish(policy(version), version)
        assert all(bool((tensor == 1).all()) for tensor in held.values())
    assert channel.reclaimed == 1, "the segment was left to its reader once; the two others serve all later versions"
    with pytest.raises(StaleTicket):
        channel.read(ticket)
    channel.release(ticket)
    channel.release(ticket)


def test_released_slots_are_used_again(channel):
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
    assert channel.reclaimed == 1 and bool((held["layer.0"] == 1).all())


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


@pytest.mark.parametrize("size", [1000, 6_000_000])
def test_changed_bytes_are_refused(channel, size):
    ticket = channel.publish(policy(1, size), 1)
    slot = channel._slots["main"][-1]
    if hasattr(slot, "memory"):
        slot.memory[: (1 << 20)] += 1
    else:
        end = slot._start + (1 << 20)
        slot._map[slot._start : end] = bytes(byte ^ 1 for byte in slot._map[slot._start : end])
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


def test_a_ticket_of_somewhere_else_is_refused(channel):
    other = open_channel("shared_memory")
    ticket = other.publish(policy(7), 7)
    other.close()
    with pytest.raises(PartFailed):
        channel.read(ticket)


def test_other_kinds_name_those_available():
    with pytest.raises(ConfigError, match=r"weights\.channel: 'http' is not available; choose one of in_process"):
        open_channel("http")
