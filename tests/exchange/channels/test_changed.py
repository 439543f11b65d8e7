"""Sending what changed: the result is equal to the bit, over every channel, and a receiver without its base says so."""

from __future__ import annotations

import pickle

import pytest
import torch

from headrace.errors import BaseMissing, PartFailed
from headrace.exchange.channels import AVAILABLE, open_channel
from headrace.exchange.channels.changed import ChangedValues

Weights = dict[str, torch.Tensor]


def weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 17, generator=generator).to(torch.bfloat16),
        "norm": torch.ones(33),
        "steps": torch.zeros((), dtype=torch.int64),
        "mask": torch.zeros(5, dtype=torch.bool),
        "empty": torch.zeros(0, 4),
        "double": torch.randn(7, generator=generator, dtype=torch.float64),
    }


def step(tensors: Weights, seed: int) -> None:
    """Change a few values of most tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors["embed"].view(-1)[torch.randint(0, 5100, (40,), generator=generator)] += 0.25
    tensors["norm"][seed % 33] = -0.0 if seed % 2 else float("nan")
    tensors["steps"] += 1
    tensors["mask"][seed % 5] ^= True


def assert_equal(found, wanted: Weights) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert (
            found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
        ), name


@pytest.fixture(params=AVAILABLE)
def channel(request: pytest.FixtureRequest, tmp_path):
    opened = open_channel(request.param, folder=str(tmp_path), scope="changed", full_every=4)
    yield opened
    opened.close()


@pytest.fixture
def ends():
    """A publisher's end and a receiver's, in memory."""
    sender = open_channel("in_process", scope="changed", full_every=100)
    receiver = ChangedValues(sender.inner, 100)
    yield sender, receiver
    sender.close()


def test_every_version_comes_out_equal_to_the_bit(channel):
    tensors = weights()
    scopes, sizes = [], []
    for version in range(1, 10):
        ticket = channel.publish(tensors.items(), version)
        assert_equal(channel.read(ticket), tensors)
        assert_equal(channel.read(ticket), tensors)  # a repeated prepare
        channel.release(ticket)
        channel.release(ticket)
        scopes.append(ticket.scope)
        sizes.append(ticket.bytes)
        step(tensors, version)
    assert scopes == ["full", *["changed"] * 3, "full", *["changed"] * 3, "full"]
    assert max(sizes[1:4]) < 0.2 * sizes[0]


def test_a_receiver_that_comes_late_or_missed_one_asks_for_it_whole(channel):
    tensors = weights()
    late = (
        pickle.loads(pickle.dumps(channel))
        if channel.inner.__class__.__name__ != "InProcessChannel"
        else ChangedValues(channel.inner)
    )
    channel.publish(tensors.items(), 1)
    for version in (2, 3):
        step(tensors, version)
        ticket = channel.publish(tensors.items(), version)
    with pytest.raises(BaseMissing, match="no version is here"):
        late.read(ticket)
    whole = channel.whole()
    assert (whole.scope, whole.version, whole.policy) == ("full", 3, "main") and channel.whole() == whole
    assert_equal(late.read(whole), tensors)
    late.release(whole)
    step(tensors, 4)
    assert_equal(late.read(channel.publish(tensors.items(), 4)), tensors)


def test_views_that_are_held_do_not_change_with_the_next_version(ends):
    sender, receiver = ends
    tensors = weights()
    first = receiver.read(sender.publish(tensors.items(), 1))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    step(tensors, 2)
    assert_equal(receiver.read(sender.publish(tensors.items(), 2)), tensors)
    assert_equal(first, kept)


def test_a_base_that_is_not_what_it_should_be_is_found_out(ends):
    sender, receiver = ends
    tensors = weights()
    found = receiver.read(sender.publish(tensors.items(), 1))
    found["double"][0] += 1  # somebody wrote to it
    step(tensors, 2)
    ticket = sender.publish(tensors.items(), 2)
    with pytest.raises(BaseMissing, match="does not come out right"):
        receiver.read(ticket)
    receiver.release(ticket)
    with pytest.raises(BaseMissing):
        receiver.read(ticket)
    assert_equal(receiver.read(sender.whole()), tensors)


def test_when_much_changes_or_shapes_do_it_travels_whole(ends):
    sender, receiver = ends
    tensors = weights()
    sender.publish(tensors.items(), 1)
    tensors["embed"] += 1
    tensors["double"] *= 2
    assert sender.publish(tensors.items(), 2).scope == "full"
    tensors["norm"] = torch.ones(34)
    ticket = sender.publish(tensors.items(), 3)
    assert ticket.scope == "full"
    assert_equal(receiver.read(ticket), tensors)
    nothing = sender.publish(tensors.items(), 4)
    assert nothing.scope == "changed" and nothing.bytes < 1000
    assert_equal(receiver.read(nothing), tensors)


def test_a_publish_that_fails_is_followed_by_a_whole_one(ends, monkeypatch):
    sender, receiver = ends
    tensors = weights()
    receiver.read(sender.publish(tensors.items(), 1))
    step(tensors, 2)
    with monkeypatch.context() as patch:
        patch.setattr(sender.inner, "publish", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sender.publish(tensors.items(), 2)
    ticket = sender.publish(tensors.items(), 2)
    assert ticket.scope == "full"
    assert_equal(receiver.read(ticket), tensors)


@pytest.mark.parametrize(
    "lie",
    [
        {"positions.4": torch.tensor([-1], dtype=torch.int32)},
        {"positions.4": torch.tensor([1 << 30], dtype=torch.int32)},
        {"positions.4": torch.tensor([0, 1, 2], dtype=torch.int32)},
        {"positions.3": torch.tensor([0])},
        {"positions.8": torch.tensor([0.5])},
        {"values.4": None},
        {"base": None},
        {"digest": torch.tensor([256])},
    ],
)
def test_changes_that_are_none_are_refused_and_the_next_whole_version_is_taken(ends, lie):
    sender, receiver = ends
    tensors = weights()
    receiver.read(sender.publish(tensors.items(), 1))
    step(tensors, 2)
    honest = sender.inner.publish

    def lying(named, *rest):
        changed = {name: tensor for name, tensor in {**dict(named), **lie}.items() if tensor is not None}
        return honest(changed.items(), *rest)

    sender.inner.publish = lying
    ticket = sender.publish(tensors.items(), 2)
    sender.inner.publish = honest
    with pytest.raises(PartFailed):
        receiver.read(ticket)
    assert_equal(receiver.read(sender.whole()), tensors)


def test_an_adapter_is_a_part_of_the_tensors_under_its_own_scope(channel):
    tensors = weights()
    channel.read(channel.publish(tensors.items(), 1))
    adapter = {"lora_A": torch.ones(4, 8), "lora_B": torch.zeros(8, 4)}
    ticket = channel.publish(adapter.items(), 2, scope="adapter")
    assert ticket.scope == "adapter" and ticket.bytes < 1000
    assert_equal(channel.read(ticket), adapter)
    channel.release(ticket)
    step(tensors, 3)
    assert_equal(channel.read(channel.publish(tensors.items(), 3)), tensors)
