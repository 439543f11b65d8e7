"""Turns a description of spaces into the network that acts: observation leaves in, numbers of the policy head and values out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.errors import ConfigError
from headrace.imports import import_object
from headrace.policies.config import PolicyConfig
from headrace.policies.dense import Dense
from headrace.policies.spaces import Leaf, Spaces

OBSERVATION_BOUND = 10.0
"""Normalised observations are clipped to this many deviations."""

Leaves = dict[str, Tensor]
State = dict[str, Tensor]


def layer(inputs: int, outputs: int, gain: float, activation: str = "") -> nn.Linear:
    """A linear layer, with an activation if one is named, with orthogonal weights of this gain and no bias at the start."""
    made = Dense(inputs, outputs, activation) if activation else nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


def tower_of(*layers: nn.Module) -> nn.Sequential:
    """Layers one after another, compiled where this machine can."""
    try:
        from headrace.policies.tower import Tower
    except Exception as error:  # a processor without numba, nowhere to keep what it compiles, ...
        warnings.warn(f"small networks are not compiled, so they are slower: {error!r}", stacklevel=2)
        return nn.Sequential(*layers)
    return Tower(*layers)


class Normaliser(nn.Module):
    """Running mean and variance of each element, as buffers: they travel and are saved with the weights.

    Updated by the trainer alone, between an update and its publishing, so that a behaviour policy and the policy it is
    compared with see the same numbers. Chan et al. 1979 for the merging.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], deviation: float = 1.0) -> None:
        """deviation: what values are divided by before the first update"""
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.full(shape, deviation**2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        return ((values - self.mean) * (self.variance + 1e-8).rsqrt()).clamp(-OBSERVATION_BOUND, OBSERVATION_BOUND)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """values: [M, ...]"""
        n = float(values.shape[0])
        if n == 0:
            return
        mean, variance = values.mean(0), values.var(0, unbiased=False)
        total = self.count + n
        difference = mean - self.mean
        merged = self.variance * self.count + variance * n + difference.square() * self.count * n / total
        self.variance.copy_(merged / total)
        self.mean.add_(difference * n / total)
        self.count.copy_(total)


class LeafEncoder(nn.Module):
    """One leaf [B, ...] -> [B, width]: numbers as they are, whole numbers one-hot, images through convolutions."""

    def __init__(self, leaf: Leaf, config: PolicyConfig) -> None:
        super().__init__()
        self.leaf = leaf
        normalised = config.normalise_observations and leaf.kind in ("vector", "image")
        bound = 255.0 if leaf.kind == "image" and leaf.dtype == "uint8" else 1.0
        self.normaliser = Normaliser(leaf.shape, bound) if normalised else None
        self.convolutions = None
        match leaf.kind:
            case "image":
                self.convolutions = Convolutions(leaf, config.convolutions, 1.0 if normalised else 1 / bound)
                self.width = self.convolutions.width
            case "discrete":
                self.width = sum(leaf.sizes)
                starts = torch.tensor(leaf.starts, dtype=torch.int64)
                self.register_buffer("starts", starts, persistent=False)
            case _:
                self.width = math.prod(leaf.shape)

    def forward(self, values: Tensor) -> Tensor:
        if self.leaf.kind == "discrete":
            return self._one_hot(values)
        values = values.to(torch.float32)
        if self.normaliser is not None:
            values = self.normaliser(values)
        return values.flatten(1) if self.convolutions is None else self.convolutions(values)

    def _one_hot(self, values: Tensor) -> Tensor:
        flat = values.reshape(len(values), -1).to(torch.int64) - self.starts
        parts = [functional.one_hot(flat[:, i], size) for i, size in enumerate(self.leaf.sizes)]
        return torch.cat(parts, -1).to(torch.float32)


class Convolutions(nn.Module):
    """An image [B, ...] -> [B, 512]: three layers (Mnih et al. 2015), with smaller kernels for images below 36 pixels.

    filters: of the layers; empty: the usual ones. scale: of the image's numbers, which the first layer's weights take over
    The axis of channels is the shortest of the first and the last. Within, channels come last, and a kernel that is a whole
    number of strides wide runs over blocks of one stride (`in_blocks`): both fill the vector units of a CPU better.
    """

    def __init__(self, leaf: Leaf, filters: tuple[int, ...] = (), scale: float = 1.0) -> None:
        super().__init__()
        shape = leaf.shape[-3:] if len(leaf.shape) > 2 else (1, *leaf.shape)
        self.image, self.channels_last, self.scale = shape, shape[-1] < shape[0], scale
        channels, *sides = (shape[2], shape[0], shape[1]) if self.channels_last else shape
        if len(leaf.shape) == 4:  # frames stacked in front count as channels
            channels *= leaf.shape[0]
        large = min(sides) >= 36
        windows = ((8, 4), (4, 2), (3, 1)) if large else ((3, 1), (3, 2), (3, 2))
        filters = filters or ((32, 64, 64) if large else (16, 32, 64))
        if len(filters) != len(windows):
            raise ConfigError("policy.convolutions", f"found {len(filters)} numbers; use {len(windows)}, or none")
        self.layers = nn.ModuleList()
        for outputs, (kernel, stride) in zip(filters, windows, strict=True):
            convolution = nn.Conv2d(channels, outputs, kernel, stride)
            nn.init.orthogonal_(convolution.weight, math.sqrt(2))
            nn.init.zeros_(convolution.bias)
            self.layers.append(convolution)
            channels, sides = outputs, [(side - kernel) // stride + 1 for side in sides]
        self.width = 512
        self.last = nn.Sequential(layer(channels * math.prod(sides), self.width, math.sqrt(2)), nn.ReLU())

    def forward(self, values: Tensor) -> Tensor:
        values = values.reshape(len(values), -1, *self.image)  # [B, frames, image]
        values = (values.permute(0, 1, 4, 2, 3) if self.channels_last else values).flatten(1, 2)
        for index, convolution in enumerate(self.layers):
            weight = convolution.weight if index or self.scale == 1.0 else convolution.weight * self.scale
            values = convolve(values, weight, convolution.bias, convolution.stride[0]).relu_()
        return self.last(values.permute(0, 2, 3, 1).flatten(1))


def convolve(values: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """A convolution of [B, C, H, W], of bytes or floats, with channels last in memory. [B, O, H', W'], laid out the same way.

    Steps of one pixel over blocks of `stride` x `stride` pixels do the same arithmetic as steps of `stride`.
    """
    kernel = weight.shape[-1]
    if stride > 1 and kernel % stride == 0 and values.dtype == torch.uint8:
        height, width = ((side - kernel) // stride * stride + kernel for side in values.shape[-2:])
        values, weight, stride = in_blocks(values[..., :height, :width], stride), in_blocks(weight, stride), 1
    values = values.to(torch.float32).contiguous(memory_format=torch.channels_last)
    return functional.conv2d(values, weight, bias, stride)


def in_blocks(values: Tensor, size: int) -> Tensor:
    """[B, C, H, W] -> [B, size * C * size, H / size, W / size], channels last: each block's pixels become channels."""
    batch, channels, height, width = values.shape
    rows, columns = height // size, width // size
    if values.dtype == torch.uint8 and size == 4 and values.is_contiguous():  # four pixels are moved as one number
        moved = values.view(torch.int32).view(batch, channels, rows, size, columns).permute(0, 2, 4, 3, 1).contiguous()
        return moved.view(torch.uint8).view(batch, rows, columns, -1).permute(0, 3, 1, 2)
    blocks = values.reshape(batch, channels, rows, size, columns, size).permute(0, 2, 4, 3, 1, 5)
    return blocks.reshape(batch, rows, columns, -1).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """All leaves [B, ...] -> features [B, width]."""

    def __init__(self, leaves: Sequence[Leaf], config: PolicyConfig) -> None:
        super().__init__()
        self.names = [leaf.name for leaf in leaves]
        self.leaves = nn.ModuleList(LeafEncoder(leaf, config) for leaf in leaves)
        width = sum(encoder.width for encoder in self.leaves)  # type: ignore[misc]
        layers: list[nn.Module] = []
        # After convolutions comes their own layer of 512: further ones cost and bring little.
        for outputs in () if all(leaf.kind == "image" for leaf in leaves) else config.hidden:
            layers.append(layer(width, outputs, math.sqrt(2), config.activation))
            width = outputs
        self.layers = tower_of(*layers)
        self.width = width

    def inputs(self, observations: Leaves) -> Tensor:
        """[B, inputs] of the layers."""
        found = [encode(observations[name]) for name, encode in zip(self.names, self.leaves, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def forward(self, observations: Leaves) -> Tensor:
        return self.layers(self.inputs(observations))

    def headed(self, observations: Leaves, head: nn.Linear) -> Tensor:
        """`head` of the features, in one call where the layers are compiled."""
        inputs = self.inputs(observations)
        return self.layers.headed(inputs, head) if hasattr(self.layers, "headed") else head(self.layers(inputs))


class PolicyNetwork(nn.Module):
    """`outputs` numbers for the policy head, and a value, from leaves.

    A separate value function has an encoder of its own, so that acting computes none of it. The value is that of
    normalised returns where those are kept: `value_mean` and `value_std` turn it back.
    """

    value_mean: Tensor
    value_std: Tensor

    def __init__(self, spaces: Spaces, config: PolicyConfig, outputs: int) -> None:
        super().__init__()
        images = any(leaf.kind == "image" for leaf in spaces.leaves)
        shared = config.shared == "yes" or (config.shared == "auto" and (images or config.recurrent != "none"))
        gaussian = spaces.action.kind == "box"
        self.encoder = Encoder(spaces.leaves, config)
        width = self.encoder.width
        self.core = self._core(config, width)
        width = width if self.core is None else config.recurrent_size
        self.policy_head = layer(width, outputs // 2 if gaussian else outputs, 0.01)
        self.log_std = nn.Parameter(torch.full((outputs // 2,), config.log_std)) if gaussian else None
        self.value_encoder = None if shared else Encoder(spaces.leaves, config)
        self.value_head = layer(width, 1, 1.0)
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_std", torch.ones(()))

    @staticmethod
    def _core(config: PolicyConfig, width: int) -> nn.RNNCellBase | None:
        kind = {"none": None, "lstm": nn.LSTMCell, "gru": nn.GRUCell}[config.recurrent]
        return None if kind is None else kind(width, config.recurrent_size)

    @property
    def recurrent(self) -> bool:
        return self.core is not None

    @property
    def values_apart(self) -> bool:
        """Whether acting computes nothing that values need."""
        return self.value_encoder is not None

    def initial_state(self, count: int) -> State:
        """Zeros for so many environments; empty without a memory."""
        if self.core is None:
            return {}
        names = ("h", "c") if isinstance(self.core, nn.LSTMCell) else ("h",)
        return {name: torch.zeros(count, self.core.hidden_size) for name in names}

    def act(self, observations: Leaves, state: State) -> tuple[Tensor, State]:
        """[B, outputs] and the state after this step. No value is computed."""
        if self.core is None:
            return self._with_spread(self.encoder.headed(observations, self.policy_head)), state
        features, state = self._remember(self.encoder(observations), state)
        return self._outputs(features), state

    def evaluate(self, observations: Leaves) -> tuple[Tensor, Tensor]:
        """[B, outputs], [B] values of a network without a memory."""
        if self.value_encoder is not None:
            outputs = self._with_spread(self.encoder.headed(observations, self.policy_head))
            return outputs, self.values(observations)
        features = self.encoder(observations)
        return self._outputs(features), self.value_head(features)[:, 0]

    def values(self, observations: Leaves) -> Tensor:
        """[B] values alone."""
        encoder = self.encoder if self.value_encoder is None else self.value_encoder
        return encoder.headed(observations, self.value_head)[:, 0]

    def unroll(self, observations: Leaves, resets: Tensor, state: State) -> tuple[Tensor, Tensor, list[State]]:
        """Leaves [T, B, ...], resets [T, B] -> outputs [T, B, P], values [T, B], and the state after each step."""
        steps, rows = resets.shape
        flat = self.encoder({name: leaf.flatten(0, 1) for name, leaf in observations.items()})
        features = flat.view(steps, rows, -1)
        states, remembered = [], []
        for t in range(steps):
            keep = (~resets[t]).to(torch.float32)[:, None]
            state = {name: value * keep for name, value in state.items()}
            output, state = self._remember(features[t], state)
            remembered.append(output)
            states.append(state)
        joined = torch.stack(remembered)
        return self._outputs(joined), self.value_head(joined)[..., 0], states

    def value_after(self, observations: Leaves, state: State) -> Tensor:
        """[B] the value of a next observation, from the state before it."""
        features, _ = self._remember(self.encoder(observations), state)
        return self.value_head(features)[:, 0]

    def normalisers(self) -> list[tuple[str, list[Normaliser]]]:
        """Leaf name -> the normalisers that see it."""
        encoders = [self.encoder, *([self.value_encoder] if self.value_encoder is not None else [])]
        found = []
        for index, name in enumerate(self.encoder.names):
            those = [e.leaves[index].normaliser for e in encoders if e.leaves[index].normaliser is not None]
            if those:
                found.append((name, those))
        return found  # type: ignore[return-value]

    def _remember(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        if self.core is None:
            return features, state
        if isinstance(self.core, nn.LSTMCell):
            h, c = self.core(features, (state["h"], state["c"]))
            return h, {"h": h, "c": c}
        h = self.core(features, state["h"])
        return h, {"h": h}

    def _outputs(self, features: Tensor) -> Tensor:
        return self._with_spread(self.policy_head(features))

    def _with_spread(self, outputs: Tensor) -> Tensor:
        return outputs if self.log_std is None else torch.cat([outputs, self.log_std.expand_as(outputs)], -1)


class UserNetwork(nn.Module):
    """A user's own nn.Module behind the same methods; it has no memory and keeps no normaliser."""

    recurrent = values_apart = False
    value_mean: Tensor
    value_std: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_std", torch.ones(()))

    def initial_state(self, count: int) -> State:
        return {}

    def act(self, observations: Leaves, state: State) -> tuple[Tensor, State]:
        return self.module(observations)[0], state

    def evaluate(self, observations: Leaves) -> tuple[Tensor, Tensor]:
        return self.module(observations)

    def values(self, observations: Leaves) -> Tensor:
        return self.module(observations)[1]

    def normalisers(self) -> list[tuple[str, list[Normaliser]]]:
        return []


def build_network(spaces: Spaces, config: PolicyConfig, outputs: int, seed: int) -> nn.Module:
    """The network that [policy] asks for; equal seeds give equal weights. Raises `ConfigError`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.kind in ("q", "soft_actor"):
            from headrace.policies.q_networks import QNetwork, SoftActor

            return (QNetwork if config.kind == "q" else SoftActor)(spaces, config, outputs)
        if config.network == "auto":
            return PolicyNetwork(spaces, config, outputs)
        kind = import_object(config.network, Path.cwd(), "policy.network")
        module = kind(spaces.leaves, outputs)
    if not isinstance(module, nn.Module):
        raise ConfigError("policy.network", f"{config.network!r} made a {type(module).__name__}, not an nn.Module")
    return UserNetwork(module)
