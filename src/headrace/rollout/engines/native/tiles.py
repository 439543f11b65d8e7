"""Products of float32 in the matrix unit of x86 processors (AMX), which multiplies small whole numbers only.

A number becomes 24 bits under the largest of its stretch of inputs, and these three signed bytes; a product of two numbers is
the sum of those of their bytes, as far as they matter (slices of a product: Ootomo, Ozaki and Yokota 2024). Bytes are multiplied
and added up exactly, so the order of sums means nothing, and a row's result is the same to the bit whatever other rows there are.
What is lost is what the 24 bits leave out: less than float32 loses in adding up, unless one input outweighs all others of its
stretch by far. Weights take three bytes, not four, to be read.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.rollout.engines.native.kernels import JOB, NUMBERS, SETTLED, wait_for
from headrace.vectors import (
    FEATURES,
    FLOAT32,
    INT,
    LANES,
    LINE,
    OPTIONS,
    VECTOR,
    add_to_word,
    compiled,
    counted,
    fetch,
    float_of_bits,
    floats_at,
    integers_at,
    multiply_add,
    number,
    pointer,
    spread,
)

ROWS, COLUMNS, DEPTH, PIECES, LEVELS = 16, 16, 64, 3, 4
"""Of a tile: rows of one matrix, columns of the other, inputs; and bytes of a number."""
TILE = ROWS * DEPTH
MOST_DEPTHS = 6
"""Tiles of inputs in a stretch: those of 16 rows and 16 columns stay in the first cache."""
_CACHED_BLOCKS = 8
_SUMS = LEVELS * ROWS * COLUMNS
_LARGEST = 0x7F7F00
"""What the largest number of a stretch becomes; a rounded one stays under 0x7f7f7f, the largest of three signed bytes."""
_NOT_FINITE = 0x7F800000
_PERMISSION, _TILE_DATA = 0x1023, 18
"""Of the call by which a process asks Linux for the unit's registers (arch_prctl)."""
_ARCH_PRCTL = 158

_f, _i = np.float32, np.int32
_VOID, _byte, _long = ir.VoidType(), ir.IntType(8), ir.IntType(64)
_FIRST_SUM, _LEFT, _RIGHT = 0, 6, 7
"""Registers: sums by how much their bytes weigh, and what is multiplied."""


@cache
def available() -> bool:
    """Whether this process may use the unit; asks the system for it."""
    if not {"+amx-int8", "+amx-tile", "+avx512f"} <= FEATURES or not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _PERMISSION, _TILE_DATA) == 0


def shapes() -> np.ndarray:
    """[ROWS, 64] bytes: what the unit is told of its registers, for 1 to ROWS rows at a time."""
    told = np.zeros((ROWS, 64), np.uint8)
    told[:, 0] = 1
    told[:, 16:32].view(np.uint16)[:] = DEPTH
    told[:, 48:56] = np.arange(1, ROWS + 1)[:, None]
    told[:, 48 + _RIGHT] = DEPTH // 4
    return told


def depths_of(inputs: int) -> int:
    return -(-inputs // DEPTH)


def stretches_of(depths: int) -> int:
    return -(-depths // MOST_DEPTHS)


def spans_of(blocks: int) -> int:
    """Spans of blocks of rows that stay in the second cache while all panels pass by."""
    return -(-blocks // _CACHED_BLOCKS)


# ---------------------------------------------------------------------------------------------------- the unit's own words


def _unit(builder: ir.IRBuilder, name: str, *values: ir.Value | int) -> None:
    """An instruction; whole numbers are names of registers."""
    given = [ir.Constant(_byte, one) if isinstance(one, int) else one for one in values]
    kind = ir.FunctionType(_VOID, [one.type for one in given])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), given)


@intrinsic
def _begin(typing, shape):
    def generate(context, builder, signature, arguments):
        _unit(builder, "ldtilecfg", pointer(builder, arguments[0], _byte))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _end(typing):
    def generate(context, builder, signature, arguments):
        _unit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _tile_product(typing, rows, weights, depths, sums, ahead, step):
    """Sums of the products of bytes, apart by how much they weigh.

    rows: [depths, PIECES, ROWS, DEPTH] bytes; weights: [depths, PIECES, DEPTH / 4, COLUMNS, 4] bytes; both highest byte first
    sums: [PIECES, ROWS, COLUMNS] of int32; ahead: from where weights are asked for that are needed later, `step` bytes at a time
    """

    def generate(context, builder, signature, arguments):
        rows, weights, depths, sums, ahead, step = arguments
        line = number(DEPTH)

        def multiply(index, carried):
            def ask(at, carried):
                fetch(builder, builder.gep(soon, [builder.mul(at, line)]), cache=2)
                return carried

            at = builder.mul(index, number(PIECES * TILE))
            row, weight = pointer(builder, rows, _byte, at), pointer(builder, weights, _byte, at)
            for right in range(PIECES):
                _unit(builder, "tileloadd64", _RIGHT, builder.gep(weight, [number(right * TILE)]), line)
                for left in range(min(PIECES, LEVELS - right)):
                    _unit(builder, "tileloadd64", _LEFT, builder.gep(row, [number(left * TILE)]), line)
                    _unit(builder, "tdpbssd", _FIRST_SUM + left + right, _LEFT, _RIGHT)
            soon = pointer(builder, ahead, _byte, builder.mul(index, step))
            with builder.if_then(builder.icmp_signed(">", step, number(0))):
                counted(builder, number(0), builder.sdiv(step, line), [], ask)
            return carried

        for level in range(LEVELS):
            _unit(builder, "tilezero", _FIRST_SUM + level)
        counted(builder, number(0), depths, [], multiply)
        for level in range(LEVELS):
            place = pointer(builder, sums, _byte, number(4 * level * ROWS * COLUMNS))
            _unit(builder, "tilestored64", _FIRST_SUM + level, place, number(4 * COLUMNS))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def _add_up(typing, sums, count, row_scales, apart, scales, start, skip, out, outputs):
    """What `_tile_product` found for `count` rows, as numbers, added to those at `start`.

    row_scales: [count] that lie `apart` floats from one another; scales: [COLUMNS]
    start: rows of COLUMNS numbers that lie `skip` floats apart; out: likewise, `outputs` apart
    """

    def generate(context, builder, signature, arguments):
        sums, count, row_scales, apart, scales, start, skip, out, outputs = arguments
        whole = ir.VectorType(INT, LANES)

        def vector(address, kind=VECTOR, *offsets):
            element = INT if kind is whole else FLOAT32
            return builder.bitcast(pointer(builder, address, element, *offsets), kind.as_pointer())

        columns = builder.load(vector(scales), align=4)

        def add(index, carried):
            at = builder.mul(index, number(COLUMNS))
            total = None
            for level in reversed(range(LEVELS)):
                part = builder.load(vector(sums, whole, at, number(level * ROWS * COLUMNS)), align=4)
                part = builder.sitofp(part, VECTOR)
                weight = ir.Constant(VECTOR, [256.0 ** (LEVELS - 1 - level)] * LANES)
                total = part if total is None else multiply_add(builder, VECTOR, part, weight, total)
            scale = builder.load(pointer(builder, row_scales, FLOAT32, builder.mul(index, apart)))
            scaled = builder.fmul(total, spread(builder, scale, VECTOR))
            before = builder.load(vector(start, VECTOR, builder.mul(index, skip)), align=4)
            place = vector(out, VECTOR, builder.mul(index, outputs))
            builder.store(multiply_add(builder, VECTOR, scaled, columns, before), place, align=4)
            return carried

        counted(builder, number(0), count, [], add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@intrinsic
def _bytes_at(typing, address):
    def generate(context, builder, signature, arguments):
        return pointer(builder, arguments[0], _byte)

    return types.CPointer(types.int8)(types.int64), generate


@intrinsic
def _bits_at(typing, address):
    def generate(context, builder, signature, arguments):
        return pointer(builder, arguments[0], INT)

    return types.CPointer(types.int32)(types.int64), generate


# ------------------------------------------------------------------------------------------------------ numbers into bytes


@njit(inline="always", **OPTIONS)
def _scale_of(address, count):
    """By what so many numbers are multiplied, and what undoes it; not a number for numbers that are not finite."""
    bits = carray(_bits_at(address), count)
    most = _i(0)
    for j in range(count):
        # Without their signs, floats are in the order of their bits, and what is no number lies above infinity.
        size = bits[j] & _i(0x7FFFFFFF)
        most = size if size > most else most
    if most >= _i(_NOT_FINITE):
        return _f(0.0), _f(np.nan)
    largest = float_of_bits(most)
    scale = _f(_LARGEST) / largest if largest > _f(1e-30) else _f(0.0)
    # `_add_up` leaves out a factor of 256, of two numbers that are multiplied.
    return scale, largest / _f(_LARGEST >> 4) if scale > _f(0.0) else _f(0.0)


@njit(inline="always", **OPTIONS)
def _bytes_of(value, scale):
    """Three signed bytes in one number: each lower one may be negative, and then lends to the one above."""
    return (_i(np.rint(value * scale)) + _i(0x8080)) ^ _i(0x8080)


@njit(**OPTIONS)
def _split(job, first, last):
    """Rows [first, last) of `product`'s into tiles."""
    rows, inputs, blocks = job[7], job[8], job[10]
    height, depths = -(-rows // blocks), -(-inputs // DEPTH)
    stretches = -(-depths // MOST_DEPTHS)
    for i in range(first, last):
        scales = carray(floats_at(job[2] + 4 * i * stretches), stretches)
        tiles = job[1] + (i // height) * depths * PIECES * TILE + (i % height) * DEPTH
        for stretch in range(stretches):
            start, stop = depths * stretch // stretches, depths * (stretch + 1) // stretches
            row = job[14] + 4 * (i * inputs + start * DEPTH)
            count = min(stop * DEPTH, inputs) - start * DEPTH
            scale, scales[stretch] = _scale_of(row, count)
            x = carray(floats_at(row), count)
            for depth in range(stop - start):
                tile = tiles + (start + depth) * PIECES * TILE
                high, middle, low = (
                    carray(_bytes_at(tile), DEPTH),
                    carray(_bytes_at(tile + TILE), DEPTH),
                    carray(_bytes_at(tile + 2 * TILE), DEPTH),
                )
                here = x[depth * DEPTH : (depth + 1) * DEPTH]
                if scale == _f(0.0) or here.shape[0] < DEPTH:
                    for j in range(DEPTH):
                        high[j], middle[j], low[j] = 0, 0, 0
                if scale != _f(0.0):
                    for j in range(here.shape[0]):
                        three = _bytes_of(here[j], scale)
                        high[j], middle[j], low[j] = three >> _i(16), three >> _i(8), three


@njit(nogil=True, **OPTIONS)
def pack(weight, outputs, inputs, tiles, scales):
    """Weights into tiles; those of outputs that a last panel lacks are zero.

    weight [outputs, inputs]; tiles [panels, depths, PIECES, DEPTH / 4, COLUMNS, 4]; scales [panels, stretches, COLUMNS]: addresses
    """
    panels, depths = -(-outputs // COLUMNS), -(-inputs // DEPTH)
    stretches = -(-depths // MOST_DEPTHS)
    for at in range(panels * COLUMNS):
        panel, column = at // COLUMNS, at % COLUMNS
        kept = carray(floats_at(scales + 4 * panel * stretches * COLUMNS), stretches * COLUMNS)
        for stretch in range(stretches):
            first, last = depths * stretch // stretches, depths * (stretch + 1) // stretches
            row = weight + 4 * (at * inputs + first * DEPTH)
            count = min(last * DEPTH, inputs) - first * DEPTH if at < outputs else 0
            scale, kept[stretch * COLUMNS + column] = _scale_of(row, count)
            x = carray(floats_at(row), count)
            for depth in range(last - first):
                tile = tiles + ((panel * depths + first + depth) * PIECES) * TILE + 4 * column
                out = carray(_bytes_at(tile), PIECES * TILE - 4 * column)
                for j in range(DEPTH):
                    i = depth * DEPTH + j
                    three = _bytes_of(x[i], scale) if i < count and scale != _f(0.0) else _i(0)
                    place = (j // 4) * 4 * COLUMNS + j % 4
                    out[place] = three >> _i(16)
                    out[place + TILE] = three >> _i(8)
                    out[place + 2 * TILE] = three


@compiled(2)
def product(address, unit):
    """Some rows into tiles, which units of the highest numbers do, or a span of blocks of rows times a stretch of panels.

    tiles [blocks, depths, PIECES, ROWS, DEPTH]; their scales [N, stretches]; weights, scales as `pack` leaves them; bias [outputs];
    out [N, outputs]; N; inputs; outputs; blocks; spans; parts of the panels; what the unit is told; x [N, inputs]; splits
    """
    job = carray(integers_at(address), NUMBERS)
    rows, inputs, outputs, blocks, spans, parts, splits = job[7], job[8], job[9], job[10], job[11], job[12], job[15]
    settled = address + 8 * (SETTLED - JOB)
    if unit >= spans * parts:
        unit -= spans * parts
        _split(job, rows * unit // splits, rows * (unit + 1) // splits)
        add_to_word(settled, 1)
        return
    wait_for(settled, splits)
    height, depths, panels = -(-rows // blocks), -(-inputs // DEPTH), outputs // COLUMNS
    stretches, span, part = -(-depths // MOST_DEPTHS), unit // parts, unit % parts
    start, stop = blocks * span // spans, blocks * (span + 1) // spans
    end = panels * (part + 1) // parts
    # What one block of rows gave is put together while the unit works on the next.
    room = np.empty(2 * _SUMS + LINE, _i)
    sums = room.ctypes.data + -room.ctypes.data % 64
    other, due = sums + 4 * _SUMS, 0
    row_scales = scales = before = skip = out = count = 0
    _begin(job[13])
    for panel in range(panels * part // parts, end):
        # While a panel is worked on, the next one is fetched from memory, a part of it beside each block of rows.
        step = -(-PIECES * ROWS // (stop - start)) * DEPTH if panel + 1 < end else 0
        for stretch in range(stretches):
            first, last = depths * stretch // stretches, depths * (stretch + 1) // stretches
            weights = job[3] + (panel * depths + first) * PIECES * TILE
            for block in range(start, stop):
                tiles = job[1] + (block * depths + first) * PIECES * TILE
                ahead = weights + depths * PIECES * TILE + (block - start) * step * (last - first)
                _tile_product(tiles, weights, last - first, sums, ahead, step)
                if due:
                    _add_up(other, count, row_scales, stretches, scales, before, skip, out, outputs)
                at, due = block * height, 1
                count, row_scales = min(height, rows - at), job[2] + 4 * (at * stretches + stretch)
                scales = job[4] + 4 * (panel * stretches + stretch) * COLUMNS
                out = job[6] + 4 * (at * outputs + panel * COLUMNS)
                before, skip = (out, outputs) if stretch else (job[5] + 4 * panel * COLUMNS, 0)
                sums, other = other, sums
    _end()
    if due:
        _add_up(other, count, row_scales, stretches, scales, before, skip, out, outputs)
