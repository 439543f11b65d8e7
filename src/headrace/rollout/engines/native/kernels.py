"""Turns the small steps between a pass's matrix products into one compiled loop each, for float32 on a processor.

As operations of torch these steps are some sixty calls a layer, each of which wakes all threads for a few microseconds of
work: beside 64 rows they took two fifths of a pass. Compiled (numba) they are five. A decoding row reads its keys and values
where they lie, block by block, so nothing is gathered or padded (paged attention: Kwon et al. 2023), and its result depends
on nothing but its own sequence. Not a number stays not a number: the loops may be reordered, but assume nothing of values.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LOOPS = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
_f = np.float32
_AHEAD, _LINE = 6, 16
"""Keys and values are asked for so many tokens before their turn, a cache line of so many numbers at a time."""


@intrinsic
def _float_of_bits(typing, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always", **_LOOPS)
def _exp(x):
    """To 2 units in the last place, in the range of float32: 2^n times a polynomial (Cephes, Moshier 1989)."""
    x = _f(-87.0) if x < _f(-87.0) else x
    x = _f(88.0) if x > _f(88.0) else x
    n = np.floor(x * _f(1.44269504088896341) + _f(0.5))
    r = x - n * _f(0.693359375) + n * _f(2.12194440e-4)
    p = _f(1.9875691500e-4) * r + _f(1.3981999507e-3)
    p = p * r + _f(8.3334519073e-3)
    p = p * r + _f(4.1665795894e-2)
    p = p * r + _f(1.6666665459e-1)
    p = p * r + _f(5.0000001201e-1)
    return (p * r * r + r + _f(1.0)) * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(**_LOOPS)
def add_norm(x, more, weight, eps, out):
    """`x += more`, and the RMS norm of that into `out` (Zhang & Sennrich 2019). x, more, out: [N, W]; weight: [W]"""
    rows, width = x.shape
    for i in range(rows):
        total = _f(0.0)
        for j in range(width):
            value = x[i, j] + more[i, j]
            x[i, j] = value
            total += value * value
        scale = _f(1.0) / np.sqrt(total / _f(width) + eps)
        for j in range(width):
            out[i, j] = x[i, j] * scale * weight[j]


@njit(**_LOOPS)
def gate(gate_up, out):
    """SwiGLU (Shazeer 2020): silu of the first half of each row times the second. gate_up: [N, 2 W]; out: [N, W]"""
    rows, width = out.shape
    for i in range(rows):
        for j in range(width):
            value = gate_up[i, j]
            silu = value / (_f(1.0) + _exp(-value)) if value > _f(-88.0) else value * _f(0.0)
            out[i, j] = silu * gate_up[i, width + j]


@intrinsic
def _fetch(typing, array, i, j, k):
    """Ask for the cache line of array[i, j, k], which is read soon."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        where = context.make_array(kind)(context, builder, arguments[0])
        element = cgutils.get_item_pointer(context, builder, kind, where, arguments[1:])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", (byte,), ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        builder.call(prefetch, [builder.bitcast(element, byte), *(ir.Constant(number, how) for how in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp), generate


@njit(inline="always", **_LOOPS)
def _norm_head(head, weight, eps):
    total = _f(0.0)
    for j in range(head.shape[0]):
        total += head[j] * head[j]
    scale = _f(1.0) / np.sqrt(total / _f(head.shape[0]) + eps)
    for j in range(head.shape[0]):
        head[j] *= scale * weight[j]


@njit(**_LOOPS)
def place(qkv, cos, sin, positions, slots, query_norm, key_norm, eps, keys, values):
    """Rotate queries in place and write rotated keys, and values, where they are kept.

    qkv: [N, heads + 2 kv_heads, D]; cos, sin: [context, D], the first half of sin negated; positions, slots: [N]
    query_norm, key_norm: [D] of norms before rotating, or empty; keys, values: [slots, kv_heads, D]
    """
    rows, kv_heads, size = qkv.shape[0], keys.shape[1], keys.shape[2]
    heads, half = qkv.shape[1] - 2 * kv_heads, size // 2
    for i in range(rows):
        at, slot = positions[i], slots[i]
        for h in range(heads + kv_heads):
            if query_norm.shape[0]:
                _norm_head(qkv[i, h], query_norm if h < heads else key_norm, eps)
            for j in range(half):
                first, second = qkv[i, h, j], qkv[i, h, j + half]
                turned = first * cos[at, j] + second * sin[at, j]
                turned_second = second * cos[at, j + half] + first * sin[at, j + half]
                if h < heads:
                    qkv[i, h, j], qkv[i, h, j + half] = turned, turned_second
                else:
                    keys[slot, h - heads, j], keys[slot, h - heads, j + half] = turned, turned_second
        values[slot] = qkv[i, heads + kv_heads :]


@cache
def attend_for(size: int, shared: int):
    """The loop that attends, for heads of `size` numbers of which `shared` have one key: with both known, what its inner
    loops do is written out."""

    @njit(**_LOOPS)
    def attend(qkv, first, tables, lengths, keys, values, scale, out):
        """Attention of decoding rows, each over the slots of its own sequence.

        qkv: [N, heads + 2 kv_heads, D] queries in front; first: row of the first that decodes; tables: [R, L] slots
        lengths: [R] how many of them count; keys, values: [slots, kv_heads, D]; out: [N, heads * D]
        """
        kv_heads = keys.shape[1]
        heads = kv_heads * shared
        scores = np.empty((heads, tables.shape[1]), np.float32)
        mixed = np.empty((heads, size), np.float32)
        for r in range(lengths.shape[0]):
            i, length = first + r, lengths[r]
            for t in range(length):
                slot, soon = tables[r, t], tables[r, min(t + _AHEAD, length - 1)]
                for k in range(kv_heads):
                    for j in range(0, size, _LINE):
                        _fetch(keys, soon, k, j)
                    for h in range(k * shared, (k + 1) * shared):
                        total = _f(0.0)
                        for j in range(size):
                            total += qkv[i, h, j] * keys[slot, k, j]
                        scores[h, t] = total * scale
            for h in range(heads):
                most = scores[h, 0]
                for t in range(length):
                    most = scores[h, t] if scores[h, t] > most else most
                total = _f(0.0)
                for t in range(length):
                    weight = _exp(scores[h, t] - most)
                    scores[h, t] = weight
                    total += weight
                for t in range(length):
                    scores[h, t] /= total
            mixed[:] = _f(0.0)
            for t in range(length):
                slot, soon = tables[r, t], tables[r, min(t + _AHEAD, length - 1)]
                for k in range(kv_heads):
                    for j in range(0, size, _LINE):
                        _fetch(values, soon, k, j)
                    for h in range(k * shared, (k + 1) * shared):
                        weight = scores[h, t]
                        for j in range(size):
                            mixed[h, j] += weight * values[slot, k, j]
            out[i, :] = mixed.reshape(heads * size)

    return attend


def compile_all(size: int, shared: int) -> None:
    """Before the first pass, each loop on the smallest arrays of the types that passes have."""
    x, qkv, kept = (np.zeros(shape, np.float32) for shape in ((1, size), (1, shared + 2, size), (1, 1, size)))
    ids, one = np.zeros(1, np.int64), _f(1.0)
    add_norm(x, x.copy(), x[0], one, x.copy())
    gate(np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32))
    place(qkv, x, x, ids, ids, x[0, :0], x[0, :0], one, kept, kept.copy())
    attend_for(size, shared)(
        qkv, 0, ids[None], ids + 1, kept, kept.copy(), one, np.zeros((1, shared * size), np.float32)
    )
