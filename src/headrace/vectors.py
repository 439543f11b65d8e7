"""The innermost loops of networks, in the vectors of this processor, and the words that threads share them out by.

Written as LLVM's own instructions (numba's `intrinsic`), because what makes them fast is which numbers stay in registers, and
that a compiler does not find in loops over arrays. Addresses are plain integers: a call costs no look at any array. Compiled
steps call one another by address (`compiled`, `call`), or each would be compiled anew in all that use it. numba keeps what it
compiled until the file changes that *uses* these loops. A loop that depends on a constant has it in its signature: numba tells
loops apart by that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

FEATURES = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
"""Of the processor that numba compiles for: its own settings may leave some of this one's out."""
LANES, MOST_ROWS = (16, 14) if "+avx512f" in FEATURES else (8, 6)
"""Numbers in a vector, and rows whose sums fit in the registers beside the weights, at two vectors a row."""
PANEL = 2 * LANES
"""Columns whose weights lie together."""
OPTIONS = {"cache": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
"""Of all that is compiled: sums may be reordered, but nothing is assumed of values."""
FLOAT, BFLOAT16, INT8 = 0, 1, 2
BYTES = {FLOAT: 4, BFLOAT16: 2, INT8: 1}

_AHEAD_TOKENS, LINE = 8, 16
"""Keys and values are asked for so many tokens before their turn, a cache line of so many numbers at a time."""

FLOAT32, _byte, _half, INT, _long = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
VECTOR = ir.VectorType(FLOAT32, LANES)


def number(value: int) -> ir.Constant:
    return ir.Constant(_long, value)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, *offsets: ir.Value) -> ir.Value:
    where = builder.inttoptr(address, kind.as_pointer())
    for offset in offsets:
        where = builder.gep(where, [offset])
    return where


def spread(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """One number in all places of a vector."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
    nowhere = ir.Constant(ir.VectorType(INT, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), nowhere)


def multiply_add(builder: ir.IRBuilder, kind: ir.VectorType, *values: ir.Value) -> ir.Value:
    function = ir.FunctionType(kind, [kind] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{kind.count}f32")
    return builder.call(fma, values)


def fetch(builder: ir.IRBuilder, where: ir.Value, cache: int = 1) -> None:
    """Ask for a cache line that is read soon; into the first cache, or only the second one."""
    byte = _byte.as_pointer()
    function = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), function)
    builder.call(prefetch, [builder.bitcast(where, byte), *(ir.Constant(INT, how) for how in (0, 4 - cache, 1))])


def counted(builder: ir.IRBuilder, first: ir.Value, last: ir.Value, carried: list[ir.Value], body) -> list[ir.Value]:
    """A loop over [first, last), which holds something: `body(index, carried)` gives what the next turn carries."""
    before = builder.basic_block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_long)
    index.add_incoming(first, before)
    now = [builder.phi(value.type) for value in carried]
    after = body(index, now)
    following = builder.add(index, number(1))
    index.add_incoming(following, builder.basic_block)
    for phi, start, value in zip(now, carried, after, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, builder.basic_block)
    builder.cbranch(builder.icmp_signed("<", following, last), loop, end)
    builder.position_at_end(end)
    return after


# --------------------------------------------------------------------------------------------------------- the product


def _weights(builder: ir.IRBuilder, form: int, where: ir.Value) -> ir.Value:
    """A vector of weights, as what they stand for."""
    if form == FLOAT:
        return builder.load(builder.bitcast(where, VECTOR.as_pointer()), align=4)
    kept = ir.VectorType(_half if form == BFLOAT16 else _byte, LANES)
    wide = ir.VectorType(INT, LANES)
    loaded = builder.load(builder.bitcast(where, kept.as_pointer()), align=1)
    if form == INT8:
        return builder.sitofp(builder.sext(loaded, wide), VECTOR)
    shift = ir.Constant(wide, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(loaded, wide), shift), VECTOR)


@intrinsic(prefer_literal=True)
def panel_product(typing, x, row, column, weights, panel, out, outputs, rows, first, last, fresh, ahead, step, form):
    """The product of up to MOST_ROWS rows with a panel's weights, [inputs, PANEL] in one of three forms (`FLOAT`, ...).

    Its sums stay in registers, each added up in the order of the inputs whatever the number of rows: a row's result does not
    depend on what it is computed with.

    x: whose rows lie `row` floats apart, and numbers of a row `column`; weights: whose inputs' lie `panel` apart
    out: whose rows lie `outputs` apart; rows: 1 to MOST_ROWS; first, last: of the inputs; fresh: 0 to add to `out`
    ahead: from where weights are asked for that are needed later, `step` bytes for each input; form: a constant
    """
    kind = form.literal_value
    element = {FLOAT: FLOAT32, BFLOAT16: _half, INT8: _byte}[kind]

    def generate(context, builder, signature, arguments):
        x, row, column, weights, panel, out, outputs, rows, first, last, fresh, ahead, step, _ = arguments
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        anew = builder.icmp_signed("!=", fresh, number(0))
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(number(count), case)
            builder.position_at_end(case)
            xs = [pointer(builder, x, FLOAT32, builder.mul(row, number(at))) for at in range(count)]
            places = [
                builder.bitcast(
                    pointer(builder, out, FLOAT32, builder.mul(outputs, number(at)), number(part * LANES)),
                    VECTOR.as_pointer(),
                )
                for at in range(count)
                for part in range(2)
            ]
            sums = [builder.select(anew, zero, builder.load(place, align=4)) for place in places]

            def add(index, sums, xs=xs):
                soon = pointer(builder, ahead, _byte, builder.mul(index, step))
                # In the first cache they would take the place of the rows that all panels are multiplied with.
                fetch(builder, soon, cache=2)
                with builder.if_then(builder.icmp_signed(">", step, number(4 * LINE))):
                    fetch(builder, builder.gep(soon, [builder.ashr(step, number(1))]), cache=2)
                where = pointer(builder, weights, element, builder.mul(index, panel))
                parts = [_weights(builder, kind, builder.gep(where, [number(part * LANES)])) for part in range(2)]
                more = []
                for start, *totals in zip(xs, sums[::2], sums[1::2], strict=True):
                    where = builder.gep(start, [builder.mul(index, column)])
                    value = spread(builder, builder.load(where), VECTOR)
                    more += [
                        multiply_add(builder, VECTOR, value, part, total)
                        for part, total in zip(parts, totals, strict=True)
                    ]
                return more

            for place, total in zip(places, counted(builder, first, last, sums, add), strict=True):
                builder.store(total, place, align=4)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13, form), generate


# ----------------------------------------------------------------------------------------------------------- attention


def _row(builder: ir.IRBuilder, kind: ir.VectorType, address: ir.Value, index: ir.Value, stride: ir.Value) -> ir.Value:
    return builder.bitcast(pointer(builder, address, FLOAT32, builder.mul(index, stride)), kind.as_pointer())


def _token(
    builder: ir.IRBuilder, kind: ir.VectorType, kept: ir.Value, slots: ir.Value, index: ir.Value, last: ir.Value,
    stride: ir.Value, ahead: ir.Value,
) -> ir.Value:  # fmt: skip
    """The vector of one token, after asking for `ahead` cache lines of a later one."""
    later = builder.add(index, number(_AHEAD_TOKENS))
    later = builder.select(builder.icmp_signed("<", later, last), later, index)
    soon = builder.load(pointer(builder, slots, _long, later))
    soon = pointer(builder, kept, FLOAT32, builder.mul(soon, stride))

    def ask(line, carried):
        fetch(builder, builder.gep(soon, [builder.mul(line, number(LINE))]))
        return carried

    counted(builder, number(0), ahead, [], ask)
    slot = builder.load(pointer(builder, slots, _long, index))
    return builder.load(_row(builder, kind, kept, slot, stride), align=4)


def _groups(size: int, heads: int) -> list[range]:
    """Heads whose numbers fit in the registers together."""
    together = max(1, (12 if LANES == 16 else 6) * LANES // size)
    return [range(first, min(first + together, heads)) for first in range(0, heads, together)]


@intrinsic(prefer_literal=True)
def token_scores(typing, query, keys, slots, count, stride, out, room, ahead, size, heads):
    """Products of each of `heads` queries, which have one key, with the keys of some tokens.

    query: [heads, size]; keys: of slot 0, whose successors lie `stride` floats apart; slots: [count]; out: [heads, room]
    ahead: cache lines to ask for of each token; size, heads: constants
    """
    constants = size, heads
    size, heads = size.literal_value, heads.literal_value
    kind = ir.VectorType(FLOAT32, size)

    def generate(context, builder, signature, arguments):
        query, keys, slots, count, stride, out, room, ahead, *_ = arguments
        function = ir.FunctionType(FLOAT32, [FLOAT32, kind])
        total = cgutils.get_or_insert_function(builder.module, function, f"llvm.vector.reduce.fadd.v{size}f32")
        for group in _groups(size, heads):
            queries = [builder.load(_row(builder, kind, query, number(one), number(size)), align=4) for one in group]

            def look(index, carried, group=group, queries=queries):
                key = _token(builder, kind, keys, slots, index, count, stride, ahead)
                for one, values in zip(group, queries, strict=True):
                    product = builder.fmul(values, key)
                    score = builder.call(total, [ir.Constant(FLOAT32, -0.0), product], fastmath=("reassoc",))
                    place = builder.add(builder.mul(room, number(one)), index)
                    builder.store(score, pointer(builder, out, FLOAT32, place))
                return carried

            counted(builder, number(0), count, [], look)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, *constants), generate


@intrinsic(prefer_literal=True)
def token_mix(typing, weights, values, slots, count, stride, out, room, ahead, size, heads):
    """Sums of the values of some tokens by the weights [heads, room] of each query. out: [heads, size]; else as above"""
    constants = size, heads
    size, heads = size.literal_value, heads.literal_value
    kind = ir.VectorType(FLOAT32, size)

    def generate(context, builder, signature, arguments):
        weights, values, slots, count, stride, out, room, ahead, *_ = arguments
        for group in _groups(size, heads):

            def add(index, sums, group=group):
                value = _token(builder, kind, values, slots, index, count, stride, ahead)
                more = []
                for one, total in zip(group, sums, strict=True):
                    place = builder.add(builder.mul(room, number(one)), index)
                    weight = builder.load(pointer(builder, weights, FLOAT32, place))
                    more.append(multiply_add(builder, kind, spread(builder, weight, kind), value, total))
                return more

            zeros = [ir.Constant(kind, [0.0] * size)] * len(group)
            for one, total in zip(group, counted(builder, number(0), count, zeros, add), strict=True):
                builder.store(total, _row(builder, kind, out, number(one), number(size)), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, *constants), generate


# --------------------------------------------------------------------------------------------------- calls by address


def compiled(numbers: int) -> Callable[[Callable[..., None]], Any]:
    """A function of so many whole numbers, compiled by itself; `.address` is what `call` takes. What a function that is made
    within another takes from it must be plain numbers, or numba does not find again what it kept."""
    return cfunc(types.void(*[types.int64] * numbers), **OPTIONS)


@intrinsic
def call(typing, address, numbers):
    """The compiled function at an address. numbers: a tuple of whole ones, as many as it takes"""
    count = len(numbers)

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.VoidType(), [_long] * count)
        values = [builder.extract_value(arguments[1], at) for at in range(count)]
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), generate


# ------------------------------------------------------------------------------------------------------- shared words


@intrinsic
def float_of_bits(typing, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], FLOAT32)

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(typing, value):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], INT)

    return types.int32(types.float32), generate


@intrinsic
def floats_at(typing, address):
    """A pointer for `carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], FLOAT32.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def integers_at(typing, address):
    """A pointer for `carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _long.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def read_word(typing, address):
    """What another thread wrote, and with it all that it wrote before."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(pointer(builder, arguments[0], _long), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def write_word(typing, address, value):
    """Let other threads see it, and all that was written before."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], pointer(builder, arguments[0], _long), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_to_word(typing, address, value):
    def generate(context, builder, signature, arguments):
        builder.atomic_rmw("add", pointer(builder, arguments[0], _long), arguments[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def replace_word(typing, address, expected, value):
    """Whether the word was as expected, and now is `value`."""

    def generate(context, builder, signature, arguments):
        where = pointer(builder, arguments[0], _long)
        got = builder.cmpxchg(where, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(got, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def give_way(typing):
    """Let whoever waits for this core have it."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(INT, [])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
