"""Networks over all kinds of leaves, their memory, and the running normaliser."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.policies.config import PolicyConfig
from headrace.policies.dense import Dense
from headrace.policies.networks import Convolutions, Normaliser, build_network
from headrace.policies.spaces import ActionSpec, Leaf, Spaces

VECTOR = Leaf("obs", "vector", (3,), "float32")
TWO = ActionSpec("discrete", (), (2,), (0,))


class Own(nn.Module):
    """A user's module: leaves -> (outputs, values)."""

    def __init__(self, observations, outputs) -> None:
        super().__init__()
        (leaf,) = observations
        self.layer = nn.Linear(leaf.shape[0], outputs + 1)

    def forward(self, observations):
        both = self.layer(observations["obs"])
        return both[:, :-1], both[:, -1]


def not_a_module(observations, outputs):
    return "nothing"


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [
        (Leaf("obs", "image", (84, 84, 4), "uint8"), (84, 84, 4)),
        (Leaf("obs", "image", (4, 84, 84), "uint8"), (4, 84, 84)),
        (Leaf("obs", "image", (12, 12, 3), "uint8"), (12, 12, 3)),
        (Leaf("obs", "image", (16, 16), "uint8"), (16, 16)),
        (Leaf("obs", "image", (2, 16, 20, 3), "uint8"), (2, 16, 20, 3)),
        (Leaf("obs", "discrete", (2,), "int64", (3, 4), (1, 0)), (2,)),
        (Leaf("obs", "binary", (5,), "int8"), (5,)),
        (Leaf("obs", "vector", (2, 3), "float64"), (2, 3)),
    ],
)
def test_every_kind_of_leaf(leaf, shape):
    network = build_network(Spaces((leaf,), TWO), PolicyConfig(), 2, seed=0)
    batch = torch.ones(5, *shape).to(getattr(torch, leaf.dtype))
    outputs, values = network.evaluate({"obs": batch})
    assert outputs.shape == (5, 2) and values.shape == (5,)
    torch.testing.assert_close(network.values({"obs": batch}), values)
    torch.testing.assert_close(network.act({"obs": batch}, {})[0], outputs)


def test_whole_numbers_are_told_apart():
    leaf = Leaf("obs", "discrete", (), "int64", (3,), (5,))
    network = build_network(Spaces((leaf,), TWO), PolicyConfig(), 2, seed=0)
    encoded = network.encoder.leaves[0](torch.tensor([5, 7]))
    assert encoded.tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_memory_unrolled_equals_step_by_step_with_resets(kind):
    network = build_network(Spaces((VECTOR,), TWO), PolicyConfig(recurrent=kind), 2, seed=1)
    shown, state = torch.randn(6, 4, 3), {n: torch.randn_like(s) for n, s in network.initial_state(4).items()}
    resets = torch.zeros(6, 4, dtype=torch.bool)
    resets[3, 1] = resets[2, 0] = True
    outputs, values, states = network.unroll({"obs": shown}, resets, state)
    for t in range(6):
        state = {name: s * ~resets[t][:, None] for name, s in state.items()}
        torch.testing.assert_close(network.value_after({"obs": shown[t]}, state), values[t])
        step, state = network.act({"obs": shown[t]}, state)
        torch.testing.assert_close(step, outputs[t])
    fresh, _ = network.act({"obs": shown[3, 1:2]}, network.initial_state(1))
    torch.testing.assert_close(outputs[3, 1], fresh[0])
    torch.testing.assert_close(states[-1]["h"], state["h"])


def test_the_normaliser_follows_what_it_has_seen():
    values = torch.randn(1000, 3) * torch.tensor([1.0, 5.0, 0.1]) + torch.tensor([0.0, 7.0, -2.0])
    normaliser = Normaliser((3,))
    for part in values.split([1, 299, 700]):
        normaliser.update(part)
    torch.testing.assert_close(normaliser.mean, values.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(normaliser.variance, values.var(0, unbiased=False), atol=1e-3, rtol=1e-3)
    normaliser.update(values[:0])
    assert float(normaliser.count) == 1000
    assert normaliser(torch.full((1, 3), 1e6)).max() == 10


def test_a_users_module_by_its_path_and_equal_seeds():
    config = PolicyConfig(network="policies.test_networks:Own")
    one, two = (build_network(Spaces((VECTOR,), TWO), config, 2, seed=4) for _ in range(2))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert one.evaluate({"obs": torch.ones(2, 3)})[0].shape == (2, 2)
    with pytest.raises(ConfigError, match=r"not an nn\.Module"):
        build_network(Spaces((VECTOR,), TWO), PolicyConfig(network="policies.test_networks:not_a_module"), 2, 0)


def test_actions_with_bounds_have_a_deviation_of_their_own():
    box = ActionSpec("box", (2,), low=(-1.0, -1.0), high=(1.0, 1.0))
    network = build_network(Spaces((VECTOR,), box), PolicyConfig(log_std=-0.5), 4, seed=0)
    outputs, _ = network.evaluate({"obs": torch.ones(3, 3)})
    assert outputs[:, 2:].tolist() == [[-0.5, -0.5]] * 3


@pytest.mark.parametrize("frozen", [False, True])
def test_our_tanh_is_tanh(frozen):
    """Result and gradients, those alone that somebody asked for."""
    torch.manual_seed(0)
    ours = Dense(3, 4, "tanh").requires_grad_(not frozen)
    with torch.no_grad():
        ours.weight.mul_(torch.tensor([[0.0], [1e-3], [1.0], [30.0]]))
    values = torch.randn(50, 3, requires_grad=frozen)
    expected = torch.tanh(torch.nn.functional.linear(values, ours.weight, ours.bias))
    torch.testing.assert_close(ours(values), expected, atol=3e-7, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(ours(values), expected, atol=3e-7, rtol=0)
    wanted = [values] if frozen else [ours.weight, ours.bias]
    weights = torch.randn(50, 4)
    found, known = (torch.autograd.grad((made * weights).sum(), wanted) for made in (ours(values), expected))
    for one, other in zip(found, known, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
def test_a_layer_takes_any_leading_shape_and_type(activation):
    made = Dense(3, 4, activation)
    values = torch.randn(2, 5, 3)
    torch.testing.assert_close(made(values).flatten(0, 1), made(values.flatten(0, 1)))
    torch.testing.assert_close(made.double()(values.double()).float(), made.float()(values))


def test_stacked_frames_are_channels_whichever_way_they_come():
    def filters(leaf: Leaf, batch: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return Convolutions(leaf)(batch)

    frames = torch.randint(256, (3, 2, 16, 20, 3), dtype=torch.uint8)
    stacked = filters(Leaf("obs", "image", (2, 16, 20, 3), "uint8"), frames)
    first = frames.permute(0, 1, 4, 2, 3).reshape(3, 6, 16, 20)
    torch.testing.assert_close(stacked, filters(Leaf("obs", "image", (6, 16, 20), "uint8"), first))
    last = first.permute(0, 2, 3, 1)
    torch.testing.assert_close(stacked, filters(Leaf("obs", "image", (16, 20, 6), "uint8"), last))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("size", [36, 42, 84])
def test_convolutions_over_blocks_are_plain_convolutions(dtype, size):
    """Outputs and gradients of the three layers of Mnih et al., for sizes that strides divide and others."""
    torch.manual_seed(0)
    ours = Convolutions(Leaf("obs", "image", (4, size, size), dtype), scale=1 / 255)
    images = torch.randint(256, (3, 4, size, size), dtype=torch.uint8).to(getattr(torch, dtype))
    found, plain = ours(images), images.float() / 255
    for convolution in ours.layers:
        plain = torch.relu(convolution(plain))
    expected = ours.last(plain.permute(0, 2, 3, 1).flatten(1))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    weights = [convolution.weight for convolution in ours.layers]
    for one, other in zip(
        *(torch.autograd.grad(made.square().sum(), weights) for made in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-3 * float(other.abs().max()), rtol=1e-3)


def test_normalised_images_show_what_moves_alone():
    """Bytes are divided by 255 before the first update; after it, pixels that never change are 0."""
    leaf, config = Leaf("obs", "image", (1, 12, 12), "uint8"), PolicyConfig(normalise_observations=True)
    network = build_network(Spaces((leaf,), TWO), config, 2, seed=0)
    ((_, (normaliser,)),) = network.normalisers()
    plain = build_network(Spaces((leaf,), TWO), PolicyConfig(), 2, seed=0)
    images = torch.randint(256, (50, 1, 12, 12), dtype=torch.uint8)
    torch.testing.assert_close(network.evaluate({"obs": images})[0], plain.evaluate({"obs": images})[0])
    images[:, :, 6:] = 77
    normaliser.update(images.float())
    shown = normaliser(images.float())
    assert (shown[:, :, 6:] == 0).all() and shown[:, :, :6].std(0).mean() == pytest.approx(1.0, abs=0.02)
