"""Turns features into the next layer's: a linear map with its activation, tanh in few passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

ACTIVATIONS = {"tanh": torch.tanh, "relu": functional.relu, "elu": functional.elu, "silu": functional.silu}
_MINUS_ONE = torch.tensor(-1.0)


class Dense(nn.Linear):
    """activation(x W' + b) of [..., inputs]: one module, so that the activation may work in the map's own memory."""

    def __init__(self, inputs: int, outputs: int, activation: str) -> None:
        super().__init__(inputs, outputs)
        self.kind, self.activation = activation, ACTIVATIONS[activation]
        self.quick = activation == "tanh"

    def forward(self, values: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not (self.quick and values.dim() == 2 and values.dtype == torch.float32 and values.device.type == "cpu"):
            return self.activation(functional.linear(values, weight, bias))
        if torch.is_grad_enabled() and (values.requires_grad or weight.requires_grad):
            return _TanhOfLinear.apply(values, weight, bias)
        return tanh_of_linear(values, weight, bias)


def tanh_of_linear(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tanh(x W' + b) [M, outputs] as 2 sigmoid(2 x W' + 2 b) - 1, to 2e-7. The doubling costs nothing, and a sigmoid has a
    vector loop on every CPU that torch runs on; tanh's takes 2 to 7 times as long."""
    made = torch.addmm(bias, values, weight.t(), beta=2, alpha=2).sigmoid_()
    return torch.add(_MINUS_ONE, made, alpha=2, out=made)


class _TanhOfLinear(torch.autograd.Function):
    """Keeps the result alone: the gradient of tanh is 1 - tanh^2."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        made = tanh_of_linear(values, weight, bias)
        ctx.save_for_backward(values, weight, made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        values, weight, made = ctx.saved_tensors
        for_values, for_weight, for_bias = ctx.needs_input_grad
        inner = torch.ops.aten.tanh_backward(gradient, made)
        return (
            inner @ weight if for_values else None,
            inner.t() @ values if for_weight else None,
            inner.sum(0) if for_bias else None,
        )
