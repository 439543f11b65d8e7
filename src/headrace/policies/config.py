"""What a control policy is made of."""

from __future__ import annotations

from typing import Literal

from headrace.configbase import Config, Positive


class PolicyConfig(Config):
    """[policy]: the network of control RL."""

    kind: Literal["auto", "actor_critic", "q", "soft_actor"] = "auto"
    """What the network gives: policy and value; values of discrete actions; a squashed normal. auto: by algorithm.kind."""
    network: str = "auto"
    """auto: convolutions for images, an MLP for the rest; or `pkg.module:Class` (or `file.py:Class`), an nn.Module built with
    (observations, outputs): leaves -> (policy outputs [B, outputs], values [B])."""
    hidden: tuple[Positive, ...] = (64, 64)
    """Widths of the layers after the leaves are joined."""
    convolutions: tuple[Positive, ...] = ()
    """Filters of an image's three layers of convolutions; empty: 32, 64, 64 (Mnih et al. 2015), or 16, 32, 64 with images below
    36 pixels."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Between the layers."""
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """A memory after the layers; its state is carried over trajectories and zero at the start of an episode."""
    recurrent_size: Positive = 64
    """Width of the memory."""
    shared: Literal["auto", "yes", "no"] = "auto"
    """Whether policy and value share their layers. auto: yes with images or a memory."""
    squash: bool = False
    """Box actions go through tanh to their bounds, in place of being clipped to them."""
    log_std: float = 0.0
    """Of Box actions, at the start (before tanh or clipping)."""
    normalise_observations: bool = False
    """By running mean and deviation of each number (of an image: each pixel), which the trainer keeps, publishes with the
    weights and saves."""
