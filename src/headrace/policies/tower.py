"""Turns features into those of the last of several layers in one compiled call: small networks spend most of their time
between products, in passes over memory and in calls. `training.backends.fused_steps` goes back through the same loops."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor, nn

from headrace.policies.dense import Dense
from headrace.vectors import FLOAT, MOST_ROWS, OPTIONS, PANEL, call, compiled, floats_at, panel_product, tanh_in_place

LOOPS = {"nogil": True, **OPTIONS}
ACTIVATIONS = {"tanh": 0, "relu": 1}
ROWS = MOST_ROWS * 18
"""Rows that go through all layers together."""
_f = np.float32


@njit(inline="always", **LOOPS)
def _activate(address, count, activation):
    if activation == 0:
        tanh_in_place(address, count)
    else:
        values = carray(floats_at(address), count)
        for j in range(count):
            values[j] = _f(0.0) if values[j] < _f(0.0) else values[j]


@compiled(9)
def times(x, row, column, weights, out, rows, inputs, outputs, fresh):
    """out [rows, outputs] = x weights, or added to it if not `fresh`. Addresses; weights: [inputs, outputs]

    x: whose rows lie `row` floats apart, and the numbers of one `column`
    """
    blocks = -(-rows // MOST_ROWS)
    for at in range(0, outputs, PANEL):
        for block in range(blocks):
            first = rows * block // blocks
            count, where = rows * (block + 1) // blocks - first, weights + 4 * at
            panel_product(
                x + 4 * first * row, row, column, where, outputs, out + 4 * (first * outputs + at), outputs, count, 0,
                inputs, fresh, where, 0, FLOAT,
            )  # fmt: skip


@njit(**LOOPS)
def size_of(widths):
    """Weights of all layers."""
    total = 0
    for layer in range(widths.shape[0] - 1):
        total += widths[layer] * widths[layer + 1]
    return total


@njit(**LOOPS)
def turned(parameters, widths, weights):
    """[inputs, outputs] weights of all layers, one after another, of [outputs, inputs] ones. weights: [layers] addresses"""
    at = 0
    for layer in range(weights.shape[0]):
        inputs, outputs = widths[layer], widths[layer + 1]
        given = carray(floats_at(weights[layer]), (outputs, inputs))
        for i in range(inputs):
            for j in range(outputs):
                parameters[at + i * outputs + j] = given[j, i]
        at += inputs * outputs


@njit(**LOOPS)
def forward(x, rows, widths, weights, biases, activation, made, product):
    """Of each layer the results [rows, outputs], one layer after another.

    x: address of [rows, widths[0]]; widths: [layers + 1]; weights: [inputs, outputs] of all layers (`turned`)
    biases: [layers] addresses; made: address; product: address of `times`
    """
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        source, w, out = x + 4 * first * widths[0], weights.ctypes.data, made
        for layer in range(biases.shape[0]):
            inputs, outputs = widths[layer], widths[layer + 1]
            here = out + 4 * first * outputs
            bias = carray(floats_at(biases[layer]), outputs)
            begun = carray(floats_at(here), (count, outputs))
            for i in range(count):
                for j in range(outputs):
                    begun[i, j] = bias[j]
            call(product, (source, inputs, 1, w, here, count, inputs, outputs, 0))
            _activate(here, count * outputs, activation)
            source, w, out = here, w + 4 * inputs * outputs, out + 4 * rows * outputs


@njit(**LOOPS)
def _run(x, rows, widths, weights, biases, activation, made, product):
    straight = np.empty(size_of(widths), np.float32)
    turned(straight, widths, weights)
    forward(x, rows, widths, straight, biases, activation, made, product)


_none = np.zeros(0, np.int64)
_run(0, 0, np.zeros(1, np.int64), _none, _none, 0, 0, times.address)  # what cannot be compiled is known at the import


class Tower(nn.Sequential):
    """Layers one after another. Where no gradient is wanted they run in one call, if they are such as `compiled` says."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        kinds = {one.kind if isinstance(one, Dense) else "" for one in layers}
        self.activation = ACTIVATIONS.get(kinds.pop(), -1) if len(kinds) == 1 else -1
        self.widths = np.array([one.in_features for one in layers[:1]] + [one.out_features for one in layers])
        self.compiled = self.activation >= 0 and self.widths[0] > 0 and not (self.widths[1:] % PANEL).any()
        """All tanh or all relu, and as wide as whole vectors."""

    def forward(self, values: Tensor) -> Tensor:
        if not (self.compiled and values.dim() == 2 and values.shape[1] == self.widths[0] and self._here(values)):
            return super().forward(values)
        rows, values = values.shape[0], values.contiguous()
        made = values.new_empty(rows * int(self.widths[1:].sum()))
        weights, biases = self.addresses()
        _run(values.data_ptr(), rows, self.widths, weights, biases, self.activation, made.data_ptr(), times.address)
        width = int(self.widths[-1])
        return made[made.numel() - rows * width :].view(rows, width)

    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """[layers] of weights, and of biases."""
        return (
            np.array([one.weight.data_ptr() for one in self]),
            np.array([one.bias.data_ptr() for one in self]),
        )

    def _here(self, values: Tensor) -> bool:
        """Whether memory is this processor's, of float32, and no gradient is wanted."""
        both = (values, self[0].weight)
        if torch.is_grad_enabled() and any(one.requires_grad for one in both):
            return False
        return all(one.dtype == torch.float32 and one.device.type == "cpu" for one in both)
