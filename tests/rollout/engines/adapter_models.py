"""Builds random adapters of a model, and the model with one of them added, which is what base and adapter must compute."""

from __future__ import annotations

import copy

import torch
from torch import nn


def random_adapter(model, seed: int, *, rank: int = 3, only: tuple[str, ...] = (), scale: float = 0.35):
    """Published factors of every linear layer but the head, or of those whose names end on one of `only`."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or layer is model.get_output_embeddings():
            continue
        if not only or name.endswith(only):
            factors[f"{name}.lora_A"] = scale * torch.randn(rank, layer.in_features, generator=generator)
            factors[f"{name}.lora_B"] = scale * torch.randn(layer.out_features, rank, generator=generator)
    return factors


def merged(model, factors):
    """A copy of the model with the adapter added to its weights."""
    made = copy.deepcopy(model)
    for name, layer in made.named_modules():
        if f"{name}.lora_A" in factors:
            layer.weight.data += factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"]
    return made


def publish_adapter(channel, factors, version: int):
    return channel.publish(list(factors.items()), version, scope="adapter")
