"""Turns accumulated gradients into new weights: AdamW over one flat tensor that the parameters are views of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.adamw import adamw

from headrace.training.config import OptimizerConfig

ALIGNMENT = 16
"""Elements: each parameter starts on a cache line."""


class FlatParameters:
    """All parameters of a model in one tensor, all gradients in another.

    values: [P] in the model's type; grads: [P]; master: [P] float32, `values` itself when that is float32
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        first = parameters[0]
        self.offsets = [0]
        for p in parameters:
            self.offsets.append(self.offsets[-1] + -(-p.numel() // ALIGNMENT) * ALIGNMENT)
        self.values = torch.zeros(self.offsets[-1], dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.values)
        self.parameters = parameters
        for p, start in zip(parameters, self.offsets[:-1], strict=True):
            view = self.values[start : start + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view
        self.bind_grads()
        self.master = self.values if first.dtype == torch.float32 else self.values.float()

    def bind_grads(self) -> None:
        """Make the parameters' gradients views of `grads`."""
        for p, start in zip(self.parameters, self.offsets[:-1], strict=True):
            p.grad = self.grads[start : start + p.numel()].view(p.shape)

    def release_grads(self) -> None:
        """Give the gradients' memory back; nothing may be accumulated until `allocate_grads`."""
        for p in self.parameters:
            p.grad = None
        self.grads = self.values.new_empty(0)

    def allocate_grads(self) -> None:
        self.grads = torch.zeros_like(self.values)
        self.bind_grads()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """To the gradients; None where a parameter has none."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                p.grad.add_(gradient)  # type: ignore[union-attr]

    def load(self) -> None:
        """Take over weights that were written into the model's parameters."""
        if self.master is not self.values:
            self.master.copy_(self.values)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of the step-th optimiser step (0 first): warm-up, then constant, or down to 0 after the last."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    done = min(done, 1.0)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    return config.lr


class FlatAdamW:
    """AdamW on a FlatParameters. Clipping costs no pass of its own: the fused kernel divides by `grad_scale`.

    The kernel is called as a function: `torch.optim.AdamW` brings in torch's compiler, which takes seconds, at its first use.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, total_steps: int) -> None:
        self.flat, self.config, self.total_steps = flat, config, total_steps
        self.attempts = 0
        self._moments: dict[str, Tensor] = {}
        """step, exp_avg, exp_avg_sq, from the first step on."""
        self._away: Path | dict[str, Tensor] | None = None

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """(gradient norm before clipping, learning rate, stepped). A gradient that is not finite changes nothing."""
        rate = learning_rate(self.config, self.attempts, self.total_steps)
        self.attempts += 1
        grads, master = self.flat.grads, self.flat.master
        norm = float(torch.linalg.vector_norm(grads, dtype=torch.float32))
        if not math.isfinite(norm):
            grads.zero_()
            return norm, rate, False
        clip = self.config.clip_norm
        if not self._moments:
            self._moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self._moments["step"] = torch.zeros((), device=master.device)
        adamw(
            [master],
            [grads if grads.dtype == torch.float32 else grads.float()],
            [self._moments["exp_avg"]],
            [self._moments["exp_avg_sq"]],
            [],
            [self._moments["step"]],
            fused=True,
            grad_scale=torch.tensor(norm / clip, device=grads.device) if 0 < clip < norm else None,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=rate,
            weight_decay=self.config.weight_decay,
            eps=self.config.eps,
            maximize=False,
        )
        if master is not self.flat.values:
            self.flat.values.copy_(master)
        grads.zero_()
        return norm, rate, True

    def offload(self, folder: Path) -> None:
        """Take the moments off the device: to host memory; from a CPU, whose memory that is, to a file in `folder`."""
        moments, self._moments = self._moments, {}
        if not moments:
            return
        if self.flat.master.device.type == "cpu":
            self._away = folder / "moments.safetensors"
            save_file(moments, self._away)
        else:
            self._away = {name: tensor.to("cpu") for name, tensor in moments.items()}

    def onload(self) -> None:
        """Bring the moments back."""
        away, self._away = self._away, None
        if away is None:
            return
        moments = load_file(away) if isinstance(away, Path) else away
        # The fused kernel keeps its step count on the device too.
        self._moments = {name: tensor.to(self.flat.master.device) for name, tensor in moments.items()}

    def state(self) -> dict[str, Tensor]:
        """Tensors to save."""
        state = {"step": torch.zeros(()), **self._moments}
        if self.flat.master is not self.flat.values:
            state["master"] = self.flat.master
        return state

    def restore(self, state: dict[str, Tensor], attempts: int) -> None:
        """Take over saved tensors."""
        self.attempts = attempts
        device = self.flat.master.device
        names = ("step", "exp_avg", "exp_avg_sq") if "exp_avg" in state else ()
        self._moments = {name: state[name].clone().to(device, torch.float32) for name in names}
        if "master" in state:
            self.flat.master.copy_(state["master"])
