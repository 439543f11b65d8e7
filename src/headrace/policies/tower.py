"""Turns features into those of the last of several layers in one compiled call: small networks spend most of their time
between products, in passes over memory and in calls. `training.backends.fused_steps` goes back through the same loops."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor, nn

from headrace.policies.activations import RELU, TANH, relu_in_place, set_rows, tanh_in_place
from headrace.policies.dense import Dense
from headrace.vectors import FLOAT, MOST_ROWS, OPTIONS, PANEL, call, compiled, floats_at, panel_product

LOOPS = {"nogil": True, **OPTIONS}
ACTIVATIONS = {"tanh": TANH, "relu": RELU}
ROWS = MOST_ROWS * 8
"""Rows that go through all layers together."""


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


@compiled(8)
def dense(x, weights, bias, out, rows, inputs, outputs, activation):
    """out [rows, outputs] = activation(x weights + bias). Addresses; x: [rows, inputs]; weights: [inputs, outputs]

    So many rows at a time that what is made of them is still at hand for the activation.
    """
    blocks = -(-rows // MOST_ROWS)
    for block in range(blocks):
        first = rows * block // blocks
        count, start, here = rows * (block + 1) // blocks - first, x + 4 * first * inputs, out + 4 * first * outputs
        set_rows(here, bias, count, outputs)
        for at in range(0, outputs, PANEL):
            where = weights + 4 * at
            panel_product(
                start, inputs, 1, where, outputs, here + 4 * at, outputs, count, 0, inputs, 0, where, 0, FLOAT
            )
        if activation == TANH:
            tanh_in_place(here, count * outputs)
        else:
            relu_in_place(here, count * outputs)


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
def forward(x, rows, widths, weights, biases, activation, made, layer):
    """Of each layer the results [rows, outputs], one layer after another.

    x: address of [rows, widths[0]]; widths: [layers + 1]; weights: [inputs, outputs] of all layers (`turned`)
    biases: [layers] addresses; made: address; layer: address of `dense`
    """
    w = weights.ctypes.data
    for index in range(biases.shape[0]):
        inputs, outputs = widths[index], widths[index + 1]
        call(layer, (x, w, biases[index], made, rows, inputs, outputs, activation))
        x, w, made = made, w + 4 * inputs * outputs, made + 4 * rows * outputs


@njit(**LOOPS)
def head(features, weight, bias, out):
    """out [N, outputs] of [N, features]; weight: [outputs, features]"""
    for i in range(features.shape[0]):
        for k in range(out.shape[1]):
            total = bias[k]
            for j in range(features.shape[1]):
                total += features[i, j] * weight[k, j]
            out[i, k] = total


@njit(**LOOPS)
def _run(x, rows, widths, weights, biases, activation, weight, bias, outs, out, layer):
    """The last layer's results [rows, width] into `out`, or with a head (`outs` of its outputs; addresses) its [rows, outs]."""
    straight = np.empty(size_of(widths), np.float32)
    turned(straight, widths, weights)
    layers = weights.shape[0]
    inputs, width = widths[0], widths[layers]
    made = np.empty(min(rows, ROWS) * widths[1:].sum(), np.float32)
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        forward(x + 4 * first * inputs, count, widths, straight, biases, activation, made.ctypes.data, layer)
        end = count * widths[1:].sum()
        features = made[end - count * width : end].reshape(count, width)
        if outs:
            head(
                features, carray(floats_at(weight), (outs, width)), carray(floats_at(bias), outs),
                carray(floats_at(out + 4 * first * outs), (count, outs)),
            )  # fmt: skip
        else:
            carray(floats_at(out + 4 * first * width), (count, width))[:] = features


_none = np.zeros(0, np.int64)
_run(
    0, 0, np.zeros(1, np.int64), _none, _none, 0, 0, 0, 0, 0, dense.address
)  # what cannot be compiled is known at the import


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
        return self._run(values, None) if self._here(values) else super().forward(values)

    def headed(self, values: Tensor, head: nn.Linear) -> Tensor:
        """`head` of the last layer's results, in the same call."""
        return self._run(values, head) if self._here(values, head.weight) else head(super().forward(values))

    def _run(self, values: Tensor, head: nn.Linear | None) -> Tensor:
        rows, values = values.shape[0], values.contiguous()
        outs = 0 if head is None else head.out_features
        out = values.new_empty(rows, outs or int(self.widths[-1]))
        weight, bias = (0, 0) if head is None else (head.weight.data_ptr(), head.bias.data_ptr())
        _run(
            values.data_ptr(), rows, self.widths, *self.addresses(), self.activation, weight, bias, outs, out.data_ptr(),
            dense.address,
        )  # fmt: skip
        return out

    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """[layers] of weights, and of biases."""
        return (
            np.array([one.weight.data_ptr() for one in self]),
            np.array([one.bias.data_ptr() for one in self]),
        )

    def _here(self, values: Tensor, *more: Tensor) -> bool:
        """Whether the call can be made: on memory of this processor, of float32, and without a gradient."""
        if not (self.compiled and values.dim() == 2 and values.shape[1] == self.widths[0]):
            return False
        those = (values, self[0].weight, *more)
        if torch.is_grad_enabled() and any(one.requires_grad for one in those):
            return False
        return all(one.dtype == torch.float32 and one.device.type == "cpu" for one in those)
