"""The innermost loops of networks, in the vectors of this processor, and the words that threads share them out by.

Written as LLVM's own instructions (numba's `intrinsic`), because what makes them fast is which numbers stay in registers, and
that a compiler does not find in loops over arrays. Addresses are plain integers: a call costs no look at any array. Compiled
steps call one another by address (`compiled`, `call`), or each would be compiled anew in all that use it. numba keeps what it
compiled until the file changes that *uses* these loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES, MOST_ROWS = (16, 14) if binding.get_host_cpu_features().get("avx512f") else (8, 6)
"""Numbers in a vector, and rows whose sums fit in the registers beside the weights, at two vectors a row."""
PANEL = 2 * LANES
"""Columns whose weights lie together."""
OPTIONS = {"cache": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
"""Of all that is compiled: sums may be reordered, but nothing is assumed of values."""
FLOAT, BFLOAT16, INT8 = 0, 1, 2
BYTES = {FLOAT: 4, BFLOAT16: 2, INT8: 1}

_AHEAD_TOKENS, LINE = 8, 16
"""Keys and values are asked for so many tokens before their turn, a cache line of so many numbers at a time."""

_float, _bit, _byte, _half, _int, _long = ir.FloatType(), *(ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_vector = ir.VectorType(_float, LANES)


def _number(value: int) -> ir.Constant:
    return ir.Constant(_long, value)


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, *offsets: ir.Value) -> ir.Value:
    where = builder.inttoptr(address, kind.as_pointer())
    for offset in offsets:
        where = builder.gep(where, [offset])
    return where


def _spread(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """One number in all places of a vector."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_int, 0))
    nowhere = ir.Constant(ir.VectorType(_int, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), nowhere)


def _multiply_add(builder: ir.IRBuilder, kind: ir.VectorType, *values: ir.Value) -> ir.Value:
    function = ir.FunctionType(kind, [kind] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{kind.count}f32")
    return builder.call(fma, values)


def _fetch(builder: ir.IRBuilder, where: ir.Value) -> None:
    """Ask for a cache line that is read soon."""
    byte = _byte.as_pointer()
    function = ir.FunctionType(ir.VoidType(), [byte, _int, _int, _int])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), function)
    builder.call(prefetch, [builder.bitcast(where, byte), *(ir.Constant(_int, how) for how in (0, 3, 1))])


def _counted(builder: ir.IRBuilder, first: ir.Value, last: ir.Value, carried: list[ir.Value], body) -> list[ir.Value]:
    """A loop over [first, last), which holds something: `body(index, carried)` gives what the next turn carries."""
    before = builder.basic_block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_long)
    index.add_incoming(first, before)
    now = [builder.phi(value.type) for value in carried]
    after = body(index, now)
    following = builder.add(index, _number(1))
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
        return builder.load(builder.bitcast(where, _vector.as_pointer()), align=4)
    kept = ir.VectorType(_half if form == BFLOAT16 else _byte, LANES)
    wide = ir.VectorType(_int, LANES)
    loaded = builder.load(builder.bitcast(where, kept.as_pointer()), align=1)
    if form == INT8:
        return builder.sitofp(builder.sext(loaded, wide), _vector)
    shift = ir.Constant(wide, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(loaded, wide), shift), _vector)


@intrinsic(prefer_literal=True)
def panel_product(typing, x, row, column, weights, panel, out, outputs, rows, first, last, fresh, ahead, step, form):
    """The product of up to MOST_ROWS rows with a panel's weights, [inputs, PANEL] in one of three forms (`FLOAT`, ...).

    Its sums stay in registers, each added up in the order of the inputs whatever the number of rows: a row's result does not
    depend on what it is computed with.

    x: whose rows lie `row` floats apart, and numbers of a row `column`; weights: whose inputs' lie `panel` apart
    out: whose rows lie `outputs` apart; rows: 1 to MOST_ROWS; first, last: of the inputs; fresh: 0 to add to `out`
    ahead: from where weights are asked for that are needed later, `step` bytes for each input; form: a constant
    """
    form = form.literal_value
    element = {FLOAT: _float, BFLOAT16: _half, INT8: _byte}[form]

    def generate(context, builder, signature, arguments):
        x, row, column, weights, panel, out, outputs, rows, first, last, fresh, ahead, step, _ = arguments
        zero = ir.Constant(_vector, [0.0] * LANES)
        anew = builder.icmp_signed("!=", fresh, _number(0))
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(_number(count), case)
            builder.position_at_end(case)
            xs = [_pointer(builder, x, _float, builder.mul(row, _number(at))) for at in range(count)]
            places = [
                builder.bitcast(
                    _pointer(builder, out, _float, builder.mul(outputs, _number(at)), _number(part * LANES)),
                    _vector.as_pointer(),
                )
                for at in range(count)
                for part in range(2)
            ]
            sums = [builder.select(anew, zero, builder.load(place, align=4)) for place in places]

            def add(index, sums, xs=xs):
                soon = _pointer(builder, ahead, _byte, builder.mul(index, step))
                _fetch(builder, soon)
                _fetch(builder, builder.gep(soon, [builder.ashr(step, _number(1))]))
                where = _pointer(builder, weights, element, builder.mul(index, panel))
                parts = [_weights(builder, form, builder.gep(where, [_number(part * LANES)])) for part in range(2)]
                more = []
                for start, *totals in zip(xs, sums[::2], sums[1::2], strict=True):
                    where = builder.gep(start, [builder.mul(index, column)])
                    value = _spread(builder, builder.load(where), _vector)
                    more += [
                        _multiply_add(builder, _vector, value, part, total)
                        for part, total in zip(parts, totals, strict=True)
                    ]
                return more

            for place, total in zip(places, _counted(builder, first, last, sums, add), strict=True):
                builder.store(total, place, align=4)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), generate


# ----------------------------------------------------------------------------------------------------------- attention


def _row(builder: ir.IRBuilder, kind: ir.VectorType, address: ir.Value, index: ir.Value, stride: ir.Value) -> ir.Value:
    return builder.bitcast(_pointer(builder, address, _float, builder.mul(index, stride)), kind.as_pointer())


def _token(
    builder: ir.IRBuilder, kind: ir.VectorType, kept: ir.Value, slots: ir.Value, index: ir.Value, last: ir.Value,
    stride: ir.Value, ahead: ir.Value,
) -> ir.Value:  # fmt: skip
    """The vector of one token, after asking for `ahead` cache lines of a later one."""
    later = builder.add(index, _number(_AHEAD_TOKENS))
    later = builder.select(builder.icmp_signed("<", later, last), later, index)
    soon = builder.load(_pointer(builder, slots, _long, later))
    soon = _pointer(builder, kept, _float, builder.mul(soon, stride))

    def ask(line, carried):
        _fetch(builder, builder.gep(soon, [builder.mul(line, _number(LINE))]))
        return carried

    _counted(builder, _number(0), ahead, [], ask)
    slot = builder.load(_pointer(builder, slots, _long, index))
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
    size, heads = size.literal_value, heads.literal_value
    kind = ir.VectorType(_float, size)

    def generate(context, builder, signature, arguments):
        query, keys, slots, count, stride, out, room, ahead, *_ = arguments
        function = ir.FunctionType(_float, [_float, kind])
        total = cgutils.get_or_insert_function(builder.module, function, f"llvm.vector.reduce.fadd.v{size}f32")
        for group in _groups(size, heads):
            queries = [builder.load(_row(builder, kind, query, _number(one), _number(size)), align=4) for one in group]

            def look(index, carried, group=group, queries=queries):
                key = _token(builder, kind, keys, slots, index, count, stride, ahead)
                for one, values in zip(group, queries, strict=True):
                    product = builder.fmul(values, key)
                    score = builder.call(total, [ir.Constant(_float, -0.0), product], fastmath=("reassoc",))
                    place = builder.add(builder.mul(room, _number(one)), index)
                    builder.store(score, _pointer(builder, out, _float, place))
                return carried

            _counted(builder, _number(0), count, [], look)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


@intrinsic(prefer_literal=True)
def token_mix(typing, weights, values, slots, count, stride, out, room, ahead, size, heads):
    """Sums of the values of some tokens by the weights [heads, room] of each query. out: [heads, size]; else as above"""
    size, heads = size.literal_value, heads.literal_value
    kind = ir.VectorType(_float, size)

    def generate(context, builder, signature, arguments):
        weights, values, slots, count, stride, out, room, ahead, *_ = arguments
        for group in _groups(size, heads):

            def add(index, sums, group=group):
                value = _token(builder, kind, values, slots, index, count, stride, ahead)
                more = []
                for one, total in zip(group, sums, strict=True):
                    place = builder.add(builder.mul(room, _number(one)), index)
                    weight = builder.load(_pointer(builder, weights, _float, place))
                    more.append(_multiply_add(builder, kind, _spread(builder, weight, kind), value, total))
                return more

            zeros = [ir.Constant(kind, [0.0] * size)] * len(group)
            for one, total in zip(group, _counted(builder, _number(0), count, zeros, add), strict=True):
                builder.store(total, _row(builder, kind, out, _number(one), _number(size)), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


# --------------------------------------------------------------------------------------------------------- activation


@intrinsic
def tanh_in_place(typing, address, count):
    """1 - 2 / (exp(2x) + 1), to 2e-7, of `count` floats, a multiple of LANES: exp as 2^n times a polynomial (Cephes, Moshier
    1989)."""

    def generate(context, builder, signature, arguments):
        address, count = arguments
        whole = ir.VectorType(_int, LANES)

        def number(value):
            return ir.Constant(_vector, [value] * LANES)

        def held(x, bound, how):
            return builder.select(builder.fcmp_ordered(how, x, number(bound)), number(bound), x)

        def run(index, carried):
            place = _pointer(builder, address, _float, builder.mul(index, _number(LANES)))
            place = builder.bitcast(place, _vector.as_pointer())
            x = held(held(builder.load(place, align=4), -10.0, "<"), 10.0, ">")
            x = builder.fadd(x, x)
            floor = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_vector, [_vector]), f"llvm.floor.v{LANES}f32"
            )
            n = builder.call(floor, [_multiply_add(builder, _vector, x, number(1.44269504088896341), number(0.5))])
            r = _multiply_add(builder, _vector, n, number(-0.693359375), x)
            r = _multiply_add(builder, _vector, n, number(2.12194440e-4), r)
            p = number(1.9875691500e-4)
            for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
                p = _multiply_add(builder, _vector, p, r, number(term))
            p = _multiply_add(builder, _vector, p, builder.fmul(r, r), builder.fadd(r, number(1.0)))
            bits = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [127] * LANES))
            power = builder.bitcast(builder.shl(bits, ir.Constant(whole, [23] * LANES)), _vector)
            below = _multiply_add(builder, _vector, p, power, number(1.0))
            builder.store(builder.fsub(number(1.0), builder.fdiv(number(2.0), below)), place, align=4)
            return carried

        _counted(builder, _number(0), builder.sdiv(count, _number(LANES)), [], run)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


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
        return builder.bitcast(arguments[0], _float)

    return types.float32(types.int32), generate


@intrinsic
def floats_at(typing, address):
    """A pointer for `carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _float.as_pointer())

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
        return builder.load_atomic(_pointer(builder, arguments[0], _long), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def write_word(typing, address, value):
    """Let other threads see it, and all that was written before."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], _long), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_to_word(typing, address, value):
    def generate(context, builder, signature, arguments):
        builder.atomic_rmw("add", _pointer(builder, arguments[0], _long), arguments[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def replace_word(typing, address, expected, value):
    """Whether the word was as expected, and now is `value`."""

    def generate(context, builder, signature, arguments):
        where = _pointer(builder, arguments[0], _long)
        got = builder.cmpxchg(where, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(got, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def give_way(typing):
    """Let whoever waits for this core have it."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(_int, [])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
