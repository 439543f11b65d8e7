"""Turns control steps into the gradient of their loss in one compiled call: forward pass, loss and backward pass, about a
hundred rows at a time, so that what lies between them stays in cache.

The same numbers as `losses.step_loss` through autograd, for networks of tanh or relu layers that choose an action or draw numbers. There
autograd's share is small beside some hundred calls that work on columns of two numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from headrace.policies.activations import pass_back
from headrace.policies.distributions import MAX_LOG_STD, MIN_LOG_STD, Categorical, Gaussian
from headrace.policies.networks import PolicyNetwork
from headrace.policies.tower import LOOPS, ROWS, Tower, dense, forward, head, size_of, times, turned
from headrace.training.backends.step_rows import Part, Rows
from headrace.training.config import AlgorithmConfig
from headrace.training.losses import MAX_LOG_RATIO
from headrace.training.optimizer import FlatParameters
from headrace.vectors import call, floats_at

_f = np.float32
_MOST_LOG_RATIO, _LEAST, _MOST = _f(MAX_LOG_RATIO), _f(MIN_LOG_STD), _f(MAX_LOG_STD)
_HALF_LOG_2_PI = _f(0.5 * np.log(2 * np.pi))
NAMES = ("total", "policy", "value", "entropy", "kl", "clip_share", "ratio_max")


@njit(**LOOPS)
def _backward(x, rows, widths, weights, activation, made, due, for_weights, for_biases, room, product):
    """Add the gradients of weights [inputs, outputs], one layer after another, and of biases, from `due` [rows, outputs] of
    the last layer's results. x, made: addresses, as in `forward`; weights: [layers] addresses; due, room: addresses of
    `rows` times the widest layer, both overwritten"""
    layers = weights.shape[0]
    w_end, b_end, m_end = for_weights.shape[0], for_biases.shape[0], rows * widths[1:].sum()
    source, other = due, room
    for layer in range(layers - 1, -1, -1):
        inputs, outputs = widths[layer], widths[layer + 1]
        w_end, b_end, m_end = w_end - inputs * outputs, b_end - outputs, m_end - rows * outputs
        pass_back(source, made + 4 * m_end, for_biases.ctypes.data + 4 * b_end, rows, outputs, activation)
        below = x if layer == 0 else made + 4 * (m_end - rows * inputs)
        call(product, (below, 1, inputs, source, for_weights.ctypes.data + 4 * w_end, inputs, rows, outputs, 0))
        if layer:
            call(product, (source, outputs, 1, weights[layer], other, rows, outputs, inputs, 1))
            source, other = other, source


@njit(**LOOPS)
def _head_backward(features, width, weight, due, to, for_features, fresh, product):
    """Add to the gradients of weight and bias, at the addresses `to`, and of the features, or set those if `fresh`.

    features, weight, for_features: addresses; due: [rows, outputs]
    """
    rows, outputs = due.shape
    for_bias, start = carray(floats_at(to[1]), outputs), due.ctypes.data
    for i in range(rows):
        for k in range(outputs):
            for_bias[k] += due[i, k]
    call(product, (start, 1, outputs, features, to[0], outputs, rows, width, 0))
    call(product, (start, outputs, 1, weight, for_features, rows, outputs, width, fresh))


@njit(**LOOPS)
def _choice(logits, chances, action):
    """Log-probability and entropy of a choice by `logits` [k], which become logarithms of the `chances` [k]."""
    most, total = logits[0], _f(0.0)
    for k in range(1, logits.shape[0]):
        most = logits[k] if logits[k] > most else most
    for k in range(logits.shape[0]):
        chances[k] = np.exp(logits[k] - most)
        total += chances[k]
    level, entropy = most + np.log(total), _f(0.0)
    for k in range(logits.shape[0]):
        logits[k] -= level
        chances[k] /= total
        entropy -= chances[k] * logits[k]
    return logits[action], entropy


@njit(**LOOPS)
def _draw(means, log_std, drawn):
    """Log-probability and entropy of what was drawn from normals around `means` [k], which become deviations from them in
    units of theirs. log_std: [k] logarithms of deviations"""
    logprob = entropy = _f(0.0)
    for k in range(means.shape[0]):
        held = min(max(log_std[k], _LEAST), _MOST)
        means[k] = (drawn[k] - means[k]) * np.exp(-held)
        logprob -= _f(0.5) * means[k] * means[k] + held + _HALF_LOG_2_PI
        entropy += held + _HALF_LOG_2_PI + _f(0.5)
    return logprob, entropy


@njit(**LOOPS)
def _losses(
    outputs, values, actions, drawn, folds, log_std, for_log_std, behavior, advantages, targets, old_values, weights, how, found,
    index,
):  # fmt: skip
    """`losses.step_loss` of the rows `index`: sums into `found` (`NAMES`), and `outputs` [n, k] and `values` [n, 1] are replaced by
    their gradients. actions: [N] whole numbers, or `drawn` [N, k] ones, with `folds` [N] to be taken from their
    log-probabilities, and `log_std` [k], whose gradient is added to `for_log_std`
    how: kind (0: surrogate, 1: policy gradient), clip, value_clip, value_coef, entropy_coef, shift and scale of advantages,
    count, mean and deviation of the value head's unit"""
    clip, value_clip, value_coef, entropy_coef = how[1], how[2], how[3], how[4]
    share, mean, std = _f(1.0) / how[7], how[8], how[9]
    chances = np.empty(outputs.shape[1], np.float32)
    for i in range(outputs.shape[0]):
        r = index[i]
        if weights[r] <= _f(0.0):
            outputs[i, :] = _f(0.0)
            values[i, 0] = _f(0.0)
            continue
        if log_std.shape[0]:
            logprob, entropy = _draw(outputs[i], log_std, drawn[r])
            logprob -= folds[r]
        else:
            logprob, entropy = _choice(outputs[i], chances, actions[r])
        advantage = (advantages[r] - how[5]) / how[6]
        log_ratio = logprob - behavior[r]
        bounded = min(max(log_ratio, -_MOST_LOG_RATIO), _MOST_LOG_RATIO)
        ratio = np.exp(bounded)
        if how[0] == _f(1.0):
            policy, due = -advantage * logprob, -advantage
        else:
            held = min(max(ratio, _f(1.0) - clip), _f(1.0) + clip)
            inside = _f(1.0) if held == ratio else _f(0.0)
            free, kept = ratio * advantage, held * advantage
            policy = -min(free, kept)
            due = -advantage * ratio if free < kept else -advantage * ratio * inside
            if log_ratio != log_ratio:
                due = log_ratio  # what is not a number must not look like a step that was taken
            elif bounded != log_ratio:
                due = _f(0.0)
            found[5] += (_f(1.0) - inside) * share
        target, old = (targets[r] - mean) / std, (old_values[r] - mean) / std
        error = values[i, 0] - target
        squared, slope = error * error, error
        if value_clip > _f(0.0):
            moved = values[i, 0] - old
            clipped = old + min(max(moved, -value_clip), value_clip) - target
            if clipped * clipped > squared:
                squared, slope = clipped * clipped, clipped if abs(moved) <= value_clip else _f(0.0)
        found[1] += policy * share
        found[2] += _f(0.5) * squared * share
        found[3] += entropy * share
        found[4] += (ratio - _f(1.0) - log_ratio) * share
        found[6] = max(found[6], ratio)
        values[i, 0] = value_coef * slope * share
        if log_std.shape[0]:
            for k in range(outputs.shape[1]):
                off, held = outputs[i, k], min(max(log_std[k], _LEAST), _MOST)
                outputs[i, k] = due * off * np.exp(-held) * share
                if held == log_std[k]:
                    for_log_std[k] += (due * (off * off - _f(1.0)) - entropy_coef) * share
        else:
            for k in range(outputs.shape[1]):
                taken = _f(1.0) if k == actions[r] else _f(0.0)
                pull = due * (taken - chances[k]) + entropy_coef * chances[k] * (outputs[i, k] + entropy)
                outputs[i, k] = pull * share


@njit(**LOOPS)
def learn(
    x, index, widths, weights, biases, activation, value_widths, value_weights, value_biases, heads, log_std, actions, drawn, folds,
    behavior, advantages, targets, old_values, row_weights, how, grads, places, found, layer, product,
):  # fmt: skip
    """Add the gradient of a part's loss to `grads` [P], and its figures to `found`.

    x: [N, inputs] of all rows; index: [M] those of the part; of the policy's layers and the value's own (none if they share
    the policy's): widths, addresses of weights and biases; heads: addresses of the policy's weight and bias and of the
    value's; log_std: [k] or none, as in `_losses`; places: where in `grads` all of these lie, in this order
    layer, product: addresses of `tower.dense` and `tower.times`
    """
    layers, own = weights.shape[0], value_weights.shape[0]
    outs, features, inputs = heads[4], widths[layers], x.shape[1]
    value_features = value_widths[own] if own else features
    straight = np.empty(size_of(widths), np.float32)
    turned(straight, widths, weights)
    value_straight = np.empty(size_of(value_widths), np.float32)
    turned(value_straight, value_widths, value_weights)
    for_weights, for_biases = np.zeros(straight.shape[0], np.float32), np.zeros(widths[1:].sum(), np.float32)
    for_value_weights = np.zeros(value_straight.shape[0], np.float32)
    for_value_biases = np.zeros(value_widths[1:].sum(), np.float32)
    widest = max(widths[1:].max(), value_widths[1:].max() if own else 0)
    made = np.empty(ROWS * for_biases.shape[0], np.float32)
    value_made = np.empty(ROWS * for_value_biases.shape[0], np.float32)
    due_room, room = np.empty(ROWS * widest, np.float32), np.empty(ROWS * widest, np.float32)
    policy_weight, policy_bias = carray(floats_at(heads[0]), (outs, features)), carray(floats_at(heads[1]), outs)
    value_weight, value_bias = carray(floats_at(heads[2]), (1, value_features)), carray(floats_at(heads[3]), 1)
    policy_at = 4 * places[2 * (layers + own) :] + np.int64(grads.ctypes.data)
    value_at = policy_at[2:]
    for_log_std = carray(floats_at(policy_at[-1]), log_std.shape[0])
    picked = np.empty((min(ROWS, index.shape[0]), inputs), np.float32)
    for first in range(0, index.shape[0], ROWS):
        rows = min(ROWS, index.shape[0] - first)
        part = index[first : first + rows]
        for i in range(rows):
            for j in range(inputs):
                picked[i, j] = x[part[i], j]
        start = picked.ctypes.data
        forward(start, rows, widths, straight, biases, activation, made.ctypes.data, layer)
        shown = made[rows * (for_biases.shape[0] - features) : rows * for_biases.shape[0]].reshape(rows, features)
        seen = shown
        if own:
            forward(start, rows, value_widths, value_straight, value_biases, activation, value_made.ctypes.data, layer)
            end = rows * for_value_biases.shape[0]
            seen = value_made[end - rows * value_features : end].reshape(rows, value_features)
        outputs, values = np.empty((rows, outs), np.float32), np.empty((rows, 1), np.float32)
        head(shown, policy_weight, policy_bias, outputs)
        head(seen, value_weight, value_bias, values)
        _losses(
            outputs, values, actions, drawn, folds, log_std, for_log_std, behavior, advantages, targets, old_values, row_weights,
            how, found, part,
        )  # fmt: skip
        due, below = due_room.ctypes.data, room.ctypes.data
        _head_backward(shown.ctypes.data, features, heads[0], outputs, policy_at, due, 1, product)
        if not own:
            _head_backward(shown.ctypes.data, features, heads[2], values, value_at, due, 0, product)
        _backward(
            start, rows, widths, weights, activation, made.ctypes.data, due, for_weights, for_biases, below, product,
        )  # fmt: skip
        if own:
            _head_backward(seen.ctypes.data, value_features, heads[2], values, value_at, due, 1, product)
            _backward(
                start, rows, value_widths, value_weights, activation, value_made.ctypes.data, due, for_value_weights,
                for_value_biases, below, product,
            )  # fmt: skip
    _give(grads, places, 0, widths, layers, for_weights, for_biases)
    _give(grads, places, 2 * layers, value_widths, own, for_value_weights, for_value_biases)


@njit(**LOOPS)
def _give(grads, places, at, widths, layers, for_weights, for_biases):
    """Add gradients to where they belong, weights as [outputs, inputs]."""
    w = b = 0
    for layer in range(layers):
        inputs, outputs = widths[layer], widths[layer + 1]
        where, shift = places[at + 2 * layer], places[at + 2 * layer + 1]
        for j in range(outputs):
            for i in range(inputs):
                grads[where + j * inputs + i] += for_weights[w + i * outputs + j]
            grads[shift + j] += for_biases[b + j]
        w, b = w + inputs * outputs, b + outputs


class FusedSteps:
    """The gradient of minibatches of one network's steps."""

    def __init__(
        self,
        network: PolicyNetwork,
        distribution: Categorical | Gaussian,
        flat: FlatParameters,
        algorithm: AlgorithmConfig,
    ) -> None:
        encoder, own = network.encoder, network.value_encoder
        self._network, self._distribution, self._algorithm = network, distribution, algorithm
        places = {id(one): start for one, start in zip(flat.parameters, flat.offsets, strict=False)}
        layers = [*encoder.layers, *(own.layers if own is not None else ()), network.policy_head, network.value_head]
        learned = [one for layer in layers for one in (layer.weight, layer.bias)]
        learned += [] if network.log_std is None else [network.log_std]
        self._places = np.array([places[id(one)] for one in learned])
        self._size = flat.grads.numel()
        self._rows: Rows | None = None
        # Compiled now, or read from where it was kept: not in the first update, which others wait for.
        none = np.zeros(0, np.float32)
        self._no_rows = self._arrays = (
            np.zeros((0, int(encoder.layers.widths[0])), np.float32),
            *(one.numpy() for one in (_NO_CHOICE, *_NONE_DRAWN)),
            *[none] * 5,
        )
        self.gradient(slice(0), self.normal(slice(0))[:2], 0.0)

    @staticmethod
    def fits(network: Any, distribution: Any) -> bool:
        """Whether these loops compute what this network does."""
        encoders = [one for one in (getattr(network, "encoder", None), getattr(network, "value_encoder", None)) if one]
        return (
            isinstance(network, PolicyNetwork)
            and isinstance(distribution, Categorical | Gaussian)
            and not network.recurrent
            and all(isinstance(one.layers, Tower) and one.layers.compiled for one in encoders)
            and all(leaf.convolutions is None for one in encoders for leaf in one.leaves)
        )

    def turn_to(self, rows: Rows) -> None:
        """The rows that are learned from, under running figures that stay as they are meanwhile."""
        if rows is self._rows:
            return
        self._rows = rows
        with torch.no_grad():
            x = self._network.encoder.inputs(rows.observations).contiguous()
        if x.shape[1] != self._network.encoder.layers.widths[0]:
            raise ValueError(
                f"observations of {x.shape[1]} numbers, and a network for {self._network.encoder.layers.widths[0]}"
            )
        outs, actions = self._network.policy_head.out_features, (rows.actions, *_NONE_DRAWN)
        if isinstance(self._distribution, Gaussian):
            if rows.actions.shape[1:] != (outs,):
                raise ValueError(f"actions of shape {tuple(rows.actions.shape[1:])}, and a policy of {outs} numbers")
            drawn = rows.actions.float().contiguous()
            actions = (_NO_CHOICE, drawn, self._distribution.folds(drawn).contiguous())
        elif rows.actions.numel() and (int(rows.actions.min()) < 0 or int(rows.actions.max()) >= outs):
            raise IndexError(
                f"actions of {int(rows.actions.min())} to {int(rows.actions.max())}, and a policy over {outs}"
            )
        wanted = (*actions, rows.behavior_logprobs, rows.advantages, rows.targets, rows.values, rows.weights)
        self._arrays = x.numpy(), *(one.numpy() for one in wanted)

    def let_go(self) -> None:
        """Of the rows."""
        self._rows, self._arrays = None, self._no_rows

    def normal(self, part: Part) -> tuple[float, float, float]:
        """Mean and deviation of the advantages of a part, as `control_device.spread`, and its number of steps."""
        return _spread(self._arrays[5], self._arrays[8], self._index(part))

    def gradient(self, part: Part, normal: tuple[float, float], count: float) -> tuple[dict[str, Tensor], Tensor]:
        """This part's figures, as `step_loss` gives them, and its gradient [P]."""
        network, chosen = self._network, self._algorithm
        how = np.array(
            [
                chosen.kind == "impala", chosen.clip, chosen.value_clip, chosen.value_coef, chosen.entropy_coef, *normal,
                max(count, 1.0), float(network.value_mean), float(network.value_std),
            ],
            np.float32,
        )  # fmt: skip
        grads, found = torch.zeros(self._size), np.zeros(len(NAMES))
        tower, own, x = network.encoder.layers, network.value_encoder, self._arrays[0]
        value = (own.layers.widths, *own.layers.addresses()) if own is not None else _NO_TOWER
        heads = (network.policy_head, network.value_head)
        log_std = _NO_SPREAD if network.log_std is None else network.log_std.detach().numpy()
        learn(
            x, self._index(part), tower.widths, *tower.addresses(), tower.activation, *value,
            np.array([one.data_ptr() for head in heads for one in (head.weight, head.bias)] + [heads[0].out_features]),
            log_std, *self._arrays[1:], how, grads.numpy(), self._places, found, dense.address, times.address,
        )  # fmt: skip
        found[0] = found[1] + chosen.value_coef * found[2] - chosen.entropy_coef * found[3]
        return {
            f"loss/{name}": figure
            for name, figure in zip(NAMES, torch.from_numpy(found.astype(np.float32)), strict=True)
        }, grads

    def _index(self, part: Part) -> np.ndarray:
        if isinstance(part, Tensor):
            return part.numpy()
        return np.arange(*part.indices(len(self._arrays[0])))


@njit(**LOOPS)
def _spread(values, weights, index):
    count = total = squares = 0.0
    for r in index:
        if weights[r] > 0:
            count += 1.0
            total += values[r]
    mean = total / max(count, 1.0)
    for r in index:
        if weights[r] > 0:
            squares += (values[r] - mean) ** 2
    deviation = np.sqrt(squares / max(count - 1.0, 1.0))
    if count < 2 or not deviation > 0.0:
        return 0.0, 1.0, count
    return mean, deviation + 1e-8, count


_NO_CHOICE, _NONE_DRAWN = torch.zeros(0, dtype=torch.int64), (torch.zeros(0, 0), torch.zeros(0))
_NO_SPREAD = np.zeros(0, np.float32)
_NO_TOWER = (np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
