"""Turns a description of spaces into the networks of off-policy learning: action values, a squashed actor, twin critics.

The actor and the value network have the `act` of `PolicyNetwork`, so that whoever steps environments runs any of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.policies.config import PolicyConfig
from headrace.policies.networks import Encoder, Leaves, State, layer
from headrace.policies.spaces import Leaf, Spaces

ACTION = "/action"
"""Name of the leaf that critics see beside the observation's; no leaf of an observation begins with a slash."""
LOG_STD = (-5.0, 2.0)


class QNetwork(nn.Module):
    """Q(s, .) of one discrete action, and the epsilon-greedy policy that follows it. `epsilon` travels with the weights."""

    recurrent = False
    epsilon: Tensor

    def __init__(self, spaces: Spaces, config: PolicyConfig, outputs: int) -> None:
        super().__init__()
        self.encoder = Encoder(spaces.leaves, config)
        self.head = layer(self.encoder.width, outputs, 1.0)
        self.register_buffer("epsilon", torch.ones(()))

    def initial_state(self, count: int) -> State:
        return {}

    def forward(self, observations: Leaves) -> Tensor:
        """[B, A]"""
        return self.head(self.encoder(observations))

    def act(self, observations: Leaves, state: State) -> tuple[Tensor, State]:
        """[B, A] logits of the policy: epsilon shared by all actions, the rest on the best one."""
        q = self(observations)
        greedy = torch.zeros_like(q).scatter_(1, q.argmax(1, keepdim=True), 1.0)
        epsilon = self.epsilon.clamp(max=1 - 1e-6)  # the best one stays the likeliest, for who plays greedily
        chances = (1 - epsilon) * greedy + epsilon / q.shape[1]
        return chances.clamp(min=1e-20).log(), state


class SoftActor(nn.Module):
    """Mean and deviation, both of the state, of a normal that goes through tanh. Haarnoja et al. 2018, arXiv:1812.05905."""

    recurrent = False

    def __init__(self, spaces: Spaces, config: PolicyConfig, outputs: int) -> None:
        super().__init__()
        self.encoder = Encoder(spaces.leaves, config)
        self.head = layer(self.encoder.width, outputs, 0.01)

    def initial_state(self, count: int) -> State:
        return {}

    def act(self, observations: Leaves, state: State) -> tuple[Tensor, State]:
        """[B, 2k] means and log deviations, the latter bounded smoothly."""
        mean, raw = self.head(self.encoder(observations)).chunk(2, -1)
        low, high = LOG_STD
        return torch.cat([mean, low + (high - low) * (torch.tanh(raw) + 1) / 2], -1), state


class TwinQ(nn.Module):
    """Two independent Q(s, a) of bounded actions. Fujimoto et al. 2018, arXiv:1802.09477."""

    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None:
        super().__init__()
        action = Leaf(ACTION, "vector", (len(spaces.action.low),), "float32")
        encoders = [Encoder((*spaces.leaves, action), config) for _ in range(2)]
        self.encoders = nn.ModuleList(encoders)
        self.heads = nn.ModuleList(layer(encoder.width, 1, 1.0) for encoder in encoders)

    def forward(self, observations: Leaves, actions: Tensor) -> tuple[Tensor, Tensor]:
        """[B], [B] for actions [B, k] between -1 and 1."""
        leaves = {**observations, ACTION: actions}
        first, second = (h(e(leaves))[:, 0] for h, e in zip(self.heads, self.encoders, strict=True))
        return first, second
