"""Turns the routers of a mixture-of-experts model into a record of the experts that they chose, or makes them choose given ones.

Rollout routing replay: sampler and trainer round differently, so near a tie they send a token to different experts, and the
ratio of an unchanged policy is far from 1. The trainer computes with the experts that the sampler used instead
(Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import ModelError


class Routers:
    """The routers of one model, in the order of its layers; a model without experts has none.

    taken: [N, top_k] for each layer, what the last forward pass chose
    forced: [N, layers, top_k] what the next passes shall choose, -1 where a router decides for itself
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        self.taken: list[Tensor] = [torch.empty(0)] * len(self.modules)
        self.forced: Tensor | None = None
        self._understood: set[int] = set()
        for layer, module in enumerate(self.modules):
            module.register_forward_hook(lambda module, _, output, at=layer: self._choose(at, module, output))

    @staticmethod
    def of(model: nn.Module) -> Routers:
        """The same object for the same model: hooks are set once."""
        if "headrace_routers" not in model.__dict__:
            model.__dict__["headrace_routers"] = Routers(model)
        return model.__dict__["headrace_routers"]

    def __len__(self) -> int:
        return len(self.modules)

    def rows(self, rows: Tensor | slice) -> np.ndarray:
        """[R, layers, top_k] of the last pass, in the smallest integer that fits."""
        chosen = torch.stack([taken[rows] for taken in self.taken], dim=1)
        experts = max(module.weight.shape[0] for module in self.modules)
        return chosen.numpy().astype(np.min_scalar_type(experts - 1))

    def _choose(self, layer: int, module: Any, output: Any) -> Any:
        logits, scores, indices = output
        self.taken[layer] = indices.detach()
        if self.forced is None:
            return None
        if layer not in self._understood:
            # Routers differ in what they make of the logits; what we put in its place must be what this one does.
            with torch.no_grad():
                own = _weights(logits, indices, scores)
            if not torch.allclose(own, scores, rtol=0, atol=1e-2 if scores.dtype == torch.bfloat16 else 1e-4):
                name = type(module).__name__
                raise ModelError(f"{name} does not weigh experts by their softmax: its routes cannot be forced")
            self._understood.add(layer)
        wanted = self.forced[:, layer].to(indices.device)
        if wanted.shape != indices.shape:
            raise ModelError(f"expert routes of shape {tuple(wanted.shape)}, the router chooses {tuple(indices.shape)}")
        forced = torch.where(wanted >= 0, wanted, indices)
        return logits, torch.where(wanted >= 0, _weights(logits, forced, scores), scores), forced


def _weights(logits: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """[N, top_k] softmax weights of given experts, adding up to 1 where the router's own do."""
    weights = torch.softmax(logits.float(), dim=-1).gather(1, indices)
    if torch.allclose(scores.detach().float().sum(dim=-1), scores.new_ones(()).float(), atol=1e-2):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(scores.dtype)
