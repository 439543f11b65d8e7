"""Products of float32 in the matrix unit of x86 processors (AMX), which multiplies bytes and bfloat16 only.

A weight becomes 24 bits under the largest of its stretch of inputs, and these three signed bytes; an input 31 bits and four
bytes. A product of two numbers is the sum of those of their bytes, as far as they matter (slices of a product: Ootomo, Ozaki and
Yokota 2024). Bytes are multiplied and added up exactly; what is lost is what the bits leave out. That is less than float32 loses
in adding up, unless a number outweighs by far all others of its stretch that matter: an input a thousand times, a weight ten.
Weights take three bytes, not four, to be read; eight-bit ones a single byte.

Weights in bfloat16 are multiplied as they are, with inputs that are sums of three such numbers (Henry, Tang and Heinecke 2019).

A row's result is the same to the bit whatever other rows there are.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.rollout.engines.native.kernels import JOB, NUMBERS, SETTLED, wait_for
from headrace.vectors import (
    BFLOAT16,
    FEATURES,
    FLOAT,
    FLOAT32,
    INT,
    INT8,
    LANES,
    OPTIONS,
    VECTOR,
    add_to_word,
    bits_of_float,
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

ROWS, COLUMNS, WIDTH = 16, 16, 64
"""Of a tile: rows of one matrix, columns of the other, and bytes of a row."""
TILE = ROWS * WIDTH
MOST_DEPTHS = 6
"""Tiles of inputs in a stretch: those of 16 rows and 16 columns stay in the first cache."""
_CACHED_BLOCKS = 8
"""Of rows, whose tiles stay in the second cache."""
_SOON = 3 * TILE
"""Bytes from what is multiplied to what is asked for, where nothing but memory is waited for."""
NEXT, NOTHING = 0, -1
"""What is asked for, in place of a step."""
_LARGEST = {4: 1 << 30, 3: 0x7F7F00}
"""What the largest number of a stretch becomes, in so many signed bytes; of three the largest is 0x7f7f7f."""
_SMALLEST = 1e-28
"""Numbers are measured by this at least."""
_NOT_FINITE = 0x7F800000
_REST = 4 * WIDTH
"""Bytes of the numbers of a tile's row."""
_UPPER_HALF = -0x10000
_PERMISSION, _TILE_DATA = 0x1023, 18
"""Of the call by which a process asks Linux for the unit's registers (arch_prctl)."""
_ARCH_PRCTL = 158

_f, _i = np.float32, np.int32
_VOID, _byte, _half, _long = ir.VoidType(), *(ir.IntType(bits) for bits in (8, 16, 64))
_RIGHT, _LEFT = 4, 7
"""Registers: pieces of weights, and one of inputs; the sums, by how much they weigh, come before."""


@dataclass(frozen=True, slots=True)
class Form:
    """How weights lie, and are multiplied.

    inputs: of a tile; left, right: pieces of an input, and of a weight; levels: of sums, each weighs `apart` times the next, and
    the last `unit`
    """

    inputs: int
    left: int
    right: int
    levels: int
    apart: float
    unit: float
    multiply: str
    sums: ir.Type

    @property
    def depth(self) -> int:
        """Bytes of a tile's inputs, all pieces of their weights."""
        return self.right * TILE


FORMS = {
    FLOAT: Form(64, 4, 3, 4, 256.0, 65536.0 / _LARGEST[4] / _LARGEST[3], "tdpbssd", INT),
    INT8: Form(64, 4, 1, 4, 256.0, 1.0 / _LARGEST[4], "tdpbssd", INT),
    BFLOAT16: Form(32, 3, 1, 3, 1.0, 1.0, "tdpbf16ps", FLOAT32),
}


@cache
def available() -> bool:
    """Whether this process may use the unit; asks the system for it."""
    if not {"+amx-int8", "+amx-bf16", "+amx-tile", "+avx512f"} <= FEATURES or not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _PERMISSION, _TILE_DATA) == 0


def shapes() -> np.ndarray:
    """[ROWS, 64] bytes: what the unit is told of its registers, for 1 to ROWS rows at a time."""
    told = np.zeros((ROWS, 64), np.uint8)
    told[:, 0] = 1
    told[:, 16:32].view(np.uint16)[:] = WIDTH
    told[:, 48:56] = np.arange(1, ROWS + 1)[:, None]
    told[:, 48 + _RIGHT : 48 + _LEFT] = WIDTH // 4
    return told


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


@intrinsic(prefer_literal=True)
def _room(typing, size):
    """The address of so many bytes, on the stack, at the start of a cache line. (An array is gone after its last use by name.)"""
    size_ = size.literal_value

    def generate(context, builder, signature, arguments):
        room = cgutils.alloca_once(builder, ir.ArrayType(_byte, size_))
        room.align = WIDTH
        return builder.ptrtoint(room, _long)

    return types.int64(size), generate


@intrinsic(prefer_literal=True)
def _multiply(typing, rows, weights, depths, sums, ahead, step, form):
    """Sums of the products of pieces, apart by how much they weigh.

    rows: [depths, left, ROWS, WIDTH] bytes; weights: [depths, right, WIDTH / 4, COLUMNS, 4] bytes; both highest piece first
    sums: [levels, ROWS, COLUMNS]; ahead: from where weights are asked for that are needed later, `step` bytes at a time; step:
    or NEXT to ask for those that come next, or NOTHING
    """
    kind = FORMS[form.literal_value]

    def generate(context, builder, signature, arguments):
        rows, weights, depths, sums, ahead, step, _ = arguments
        line = number(WIDTH)

        def add(index, carried):
            def ask(at, carried):
                fetch(builder, builder.gep(soon, [builder.mul(at, line)]), cache=2)
                return carried

            row = pointer(builder, rows, _byte, builder.mul(index, number(kind.left * TILE)))
            weight = pointer(builder, weights, _byte, builder.mul(index, number(kind.depth)))
            for right in range(kind.right):
                _unit(builder, "tileloadd64", _RIGHT + right, builder.gep(weight, [number(right * TILE)]), line)
                with builder.if_then(builder.icmp_signed("==", step, number(NEXT))):
                    for at in range(ROWS):
                        fetch(builder, builder.gep(weight, [number(_SOON + right * TILE + at * WIDTH)]))
            for left in range(kind.left):
                _unit(builder, "tileloadd64", _LEFT, builder.gep(row, [number(left * TILE)]), line)
                for right in range(min(kind.right, kind.levels - left)):
                    _unit(builder, kind.multiply, left + right, _LEFT, _RIGHT + right)
            soon = pointer(builder, ahead, _byte, builder.mul(index, step))
            with builder.if_then(builder.icmp_signed(">", step, number(0))):
                counted(builder, number(0), builder.sdiv(step, line), [], ask)
            return carried

        for level in range(kind.levels):
            _unit(builder, "tilezero", level)
        counted(builder, number(0), depths, [], add)
        for level in range(kind.levels):
            place = pointer(builder, sums, _byte, number(4 * level * ROWS * COLUMNS))
            _unit(builder, "tilestored64", level, place, number(4 * COLUMNS))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, form), generate


@intrinsic(prefer_literal=True)
def _add_up(typing, sums, count, row_scales, apart, scales, start, skip, out, outputs, form):
    """What `_multiply` found for `count` rows, as numbers, added to those at `start`.

    row_scales: [count] that lie `apart` floats from one another; scales: [COLUMNS]
    start: rows of COLUMNS numbers that lie `skip` floats apart; out: likewise, `outputs` apart
    """
    kind = FORMS[form.literal_value]

    def generate(context, builder, signature, arguments):
        sums, count, row_scales, apart, scales, start, skip, out, outputs, _ = arguments
        found = ir.VectorType(kind.sums, LANES)

        def vector(address, vectors=VECTOR, *offsets):
            return builder.bitcast(pointer(builder, address, vectors.element, *offsets), vectors.as_pointer())

        columns = builder.load(vector(scales), align=4)

        def add(index, carried):
            at = builder.mul(index, number(COLUMNS))
            total = None
            for level in reversed(range(kind.levels)):
                part = builder.load(vector(sums, found, at, number(level * ROWS * COLUMNS)), align=4)
                part = builder.sitofp(part, VECTOR) if kind.sums == INT else part
                weight = ir.Constant(VECTOR, [kind.unit * kind.apart ** (kind.levels - 1 - level)] * LANES)
                total = (
                    builder.fmul(part, weight) if total is None else multiply_add(builder, VECTOR, part, weight, total)
                )
            scale = builder.load(pointer(builder, row_scales, FLOAT32, builder.mul(index, apart)))
            scaled = builder.fmul(total, spread(builder, scale, VECTOR))
            before = builder.load(vector(start, VECTOR, builder.mul(index, skip)), align=4)
            place = vector(out, VECTOR, builder.mul(index, outputs))
            builder.store(multiply_add(builder, VECTOR, scaled, columns, before), place, align=4)
            return carried

        counted(builder, number(0), count, [], add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, form), generate


def _pointers(element: ir.Type, kind: types.Type) -> Any:
    """A function that makes pointers, for `carray`, of addresses."""

    @intrinsic
    def at(typing, address):
        def generate(context, builder, signature, arguments):
            return pointer(builder, arguments[0], element)

        return types.CPointer(kind)(types.int64), generate

    return at


_halves_at, _bits_at = _pointers(_half, types.int16), _pointers(INT, types.int32)


# ----------------------------------------------------------------------------------------------------- numbers into pieces


@intrinsic
def _largest_bits(typing, address, lines):
    """The largest of 64 * lines floats without their signs, as bits: in the order of these, what is no number lies above
    infinity."""

    def generate(context, builder, signature, arguments):
        address, lines = arguments
        whole = ir.VectorType(INT, WIDTH)

        def look(index, carried):
            where = pointer(builder, address, INT, builder.mul(index, number(WIDTH)))
            bits = builder.load(builder.bitcast(where, whole.as_pointer()), align=4)
            size = builder.and_(bits, ir.Constant(whole, [0x7FFFFFFF] * WIDTH))
            return [builder.select(builder.icmp_signed(">", size, carried[0]), size, carried[0])]

        most = counted(builder, number(0), lines, [ir.Constant(whole, [0] * WIDTH)], look)[0]
        function = ir.FunctionType(INT, [whole])
        largest = cgutils.get_or_insert_function(builder.module, function, f"llvm.vector.reduce.smax.v{WIDTH}i32")
        return builder.call(largest, [most])

    return types.int32(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def _split_lines(typing, address, lines, tile, scale, pieces):
    """The bytes of 64 * lines floats, times `scale`, into tiles."""
    pieces_ = pieces.literal_value
    lends = sum(0x80 << 8 * piece for piece in range(pieces_ - 1))

    def generate(context, builder, signature, arguments):
        address, lines, tile, scale, _ = arguments
        floats, whole, narrow = (ir.VectorType(kind, WIDTH) for kind in (FLOAT32, INT, _byte))
        round_ = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(floats, [floats]), f"llvm.nearbyint.v{WIDTH}f32"
        )
        scales, offset = spread(builder, scale, floats), ir.Constant(whole, [lends] * WIDTH)

        def split(index, carried):
            where = pointer(builder, address, FLOAT32, builder.mul(index, number(WIDTH)))
            x = builder.load(builder.bitcast(where, floats.as_pointer()), align=4)
            # Each lower byte may be negative, and then lends to the one above.
            bits = builder.fptosi(builder.call(round_, [builder.fmul(x, scales)]), whole)
            bits = builder.xor(builder.add(bits, offset), offset)
            for piece in range(pieces_):
                some = builder.lshr(bits, ir.Constant(whole, [8 * (pieces_ - 1 - piece)] * WIDTH))
                place = pointer(builder, tile, _byte, builder.mul(index, number(pieces_ * TILE)), number(piece * TILE))
                builder.store(builder.trunc(some, narrow), builder.bitcast(place, narrow.as_pointer()), align=1)
            return carried

        counted(builder, number(0), lines, [], split)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, pieces), generate


def _splitter(pieces: int) -> Any:
    """Numbers into tiles of 64 inputs, in so many bytes each."""
    most_of_all = _LARGEST[pieces]

    @njit(inline="always", **OPTIONS)
    def scale_of(bits):
        """By what numbers are multiplied of which the largest has these bits, and what that one is; not a number for those that
        are not finite."""
        if bits >= _i(_NOT_FINITE):
            return _f(0.0), _f(np.nan)
        largest = max(float_of_bits(bits), _f(_SMALLEST))
        return _f(most_of_all) / largest, largest

    @njit(inline="always", **OPTIONS)
    def split(row, count, tile):
        """Some numbers at `row`. Returns what the largest is."""
        lines, left = count // WIDTH, count % WIDTH
        if left == 0:
            scale, largest = scale_of(_largest_bits(row, lines))
            _split_lines(row, lines, tile, scale, pieces)
            return largest
        place = _room(_REST)
        rest, last = carray(floats_at(place), WIDTH), carray(floats_at(row + 4 * lines * WIDTH), left)
        for j in range(WIDTH):
            rest[j] = last[j] if j < left else _f(0.0)
        bits = _largest_bits(place, 1)
        if lines:
            bits = max(bits, _largest_bits(row, lines))
        scale, largest = scale_of(bits)
        if lines:
            _split_lines(row, lines, tile, scale, pieces)
        _split_lines(place, 1, tile + lines * pieces * TILE, scale, pieces)
        return largest

    return split


_split_input, _split_weight = _splitter(4), _splitter(3)


@njit(**OPTIONS)
def _split_into_halves(row, count, tile):
    """Some numbers at `row` into tiles of 32 inputs: cut off at half their bits, what is left again, and again."""
    x = carray(floats_at(row), count)
    width = WIDTH // 2
    for first in range(0, count, width):
        high, middle, low = (
            carray(_halves_at(tile), width),
            carray(_halves_at(tile + TILE), width),
            carray(_halves_at(tile + 2 * TILE), width),
        )
        here = x[first : first + width]
        if here.shape[0] < width:
            for j in range(width):
                high[j], middle[j], low[j] = 0, 0, 0
        for j in range(here.shape[0]):
            one = bits_of_float(here[j])
            rest = here[j] - float_of_bits(one & _i(_UPPER_HALF))
            two = bits_of_float(rest)
            three = bits_of_float(rest - float_of_bits(two & _i(_UPPER_HALF)))
            high[j], middle[j], low[j] = one >> _i(16), two >> _i(16), three >> _i(16)
        tile += 3 * TILE
    return _f(1.0)


@njit(nogil=True, **OPTIONS)
def pack(weight, outputs, inputs, tiles, scales):
    """Weights of float32 into tiles; those of outputs that a last panel lacks are zero.

    weight [outputs, inputs]; tiles [panels, depths, 3, WIDTH / 4, COLUMNS, 4]; scales [panels, stretches, COLUMNS]: addresses
    """
    depths = -(-inputs // WIDTH)
    stretches = -(-depths // MOST_DEPTHS)
    # As rows of inputs are split, with one row a tile; four bytes of a column then go where they belong.
    line = np.zeros((depths, 3, ROWS, WIDTH // 4), _i)
    for at in range(-(-outputs // COLUMNS) * COLUMNS):
        panel, column = at // COLUMNS, at % COLUMNS
        kept = carray(floats_at(scales + 4 * panel * stretches * COLUMNS), stretches * COLUMNS)
        out = carray(_bits_at(tiles + panel * depths * 3 * TILE), (depths, 3, WIDTH // 4, COLUMNS))
        if at >= outputs:
            out[:, :, :, column] = 0
        for stretch in range(stretches):
            first, last = depths * stretch // stretches, depths * (stretch + 1) // stretches
            largest = _f(0.0)
            if at < outputs:
                row, count = weight + 4 * (at * inputs + first * WIDTH), min(last * WIDTH, inputs) - first * WIDTH
                largest = _split_weight(row, count, line[first].ctypes.data)
            kept[stretch * COLUMNS + column] = largest
        if at < outputs:
            for depth in range(depths):
                for piece in range(3):
                    for four in range(WIDTH // 4):
                        out[depth, piece, four, column] = line[depth, piece, 0, four]


# ------------------------------------------------------------------------------------------------------------- the product


@cache
def product_for(form: int) -> Any:
    """The step that multiplies, from weights in one form."""
    width, left, depth, in_bytes = FORMS[form].inputs, FORMS[form].left, FORMS[form].depth, FORMS[form].sums == INT
    size, numbers, to_settled = 4 * FORMS[form].levels * ROWS * COLUMNS, NUMBERS, 8 * (SETTLED - JOB)

    @njit(**OPTIONS)
    def split_rows(job, first, last, height, depths, stretches):
        for i in range(first, last):
            scales = carray(floats_at(job[2] + 4 * i * stretches), stretches)
            tiles = job[1] + (i // height) * depths * left * TILE + (i % height) * WIDTH
            for stretch in range(stretches):
                start, stop = depths * stretch // stretches, depths * (stretch + 1) // stretches
                row, count = job[14] + 4 * (i * job[8] + start * width), min(stop * width, job[8]) - start * width
                if in_bytes:
                    scales[stretch] = _split_input(row, count, tiles + start * left * TILE)
                else:
                    scales[stretch] = _split_into_halves(row, count, tiles + start * left * TILE)

    @compiled(2)
    def product(address, unit):
        """Some rows into tiles, which units of the highest numbers do, or a span of blocks of rows times a stretch of panels.

        tiles [blocks, depths, left, ROWS, WIDTH] bytes; their scales [N, stretches]; weights [panels, depths, right, TILE] bytes;
        scales [panels, stretches, COLUMNS]; bias [outputs]; out [N, outputs]; N; inputs; outputs; blocks; spans; parts of the
        panels; what the unit is told; x [N, inputs]; splits
        """
        job = carray(integers_at(address), numbers)
        rows, inputs, outputs, blocks, spans, parts, splits = job[7], job[8], job[9], job[10], job[11], job[12], job[15]
        height, depths, panels = -(-rows // blocks), -(-inputs // width), outputs // COLUMNS
        stretches = -(-depths // MOST_DEPTHS)
        if unit >= spans * parts:
            unit -= spans * parts
            split_rows(job, rows * unit // splits, rows * (unit + 1) // splits, height, depths, stretches)
            add_to_word(address + to_settled, 1)
            return
        wait_for(address + to_settled, splits)
        span, part = unit // parts, unit % parts
        start, stop = blocks * span // spans, blocks * (span + 1) // spans
        # While a panel is worked on, the next one is fetched from memory, a part of it beside each block of rows. A single block
        # waits for memory alone, and asks for what comes next.
        step = -(-depth // WIDTH // (stop - start)) * WIDTH if stop - start > 1 else NEXT
        # What one block of rows gave is put together while the unit works on the next.
        sums, other, due = _room(size), _room(size), 0
        row_scales = column_scales = before = skip = out = count = 0
        _begin(job[13])
        for panel in range(panels * part // parts, panels * (part + 1) // parts):
            for stretch in range(stretches):
                first, last = depths * stretch // stretches, depths * (stretch + 1) // stretches
                weights = job[3] + (panel * depths + first) * depth
                for block in range(start, stop):
                    tiles = job[1] + (block * depths + first) * left * TILE
                    ahead = weights + depths * depth + (block - start) * step * (last - first)
                    _multiply(tiles, weights, last - first, sums, ahead, step, form)
                    if due:
                        _add_up(other, count, row_scales, stretches, column_scales, before, skip, out, outputs, form)
                    at, due = block * height, 1
                    count, row_scales = min(height, rows - at), job[2] + 4 * (at * stretches + stretch)
                    column_scales = job[4] + 4 * (panel * stretches + stretch) * COLUMNS
                    out = job[6] + 4 * (at * outputs + panel * COLUMNS)
                    before, skip = (out, outputs) if stretch else (job[5] + 4 * panel * COLUMNS, 0)
                    sums, other = other, sums
        _end()
        if due:
            _add_up(other, count, row_scales, stretches, column_scales, before, skip, out, outputs, form)

    return product
