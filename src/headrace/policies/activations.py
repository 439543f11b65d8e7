"""The activations of small networks and the way back through them, in vectors."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.vectors import FEATURES, FLOAT32, LANES, VECTOR, counted, multiply_add, number, pointer

TANH, RELU = 0, 1

_RECIPROCAL = "llvm.x86.avx512.rcp14.ps.512" if LANES == 16 else "llvm.x86.avx.rcp.ps.256" if "+avx" in FEATURES else ""
"""This processor's guess at one over a vector: a division takes as long as all else of a tanh."""


def _number(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def _place(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return builder.bitcast(pointer(builder, address, FLOAT32, index), VECTOR.as_pointer())


def _one_over(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The guess, and one step of Newton's method: to the last digit but one."""
    if not _RECIPROCAL:
        return builder.fdiv(_number(1.0), x)
    if LANES == 16:
        mask = ir.IntType(16)
        function = ir.FunctionType(VECTOR, [VECTOR, VECTOR, mask])
        more = (_number(0.0), ir.Constant(mask, -1))
    else:
        function, more = ir.FunctionType(VECTOR, [VECTOR]), ()
    guess = builder.call(cgutils.get_or_insert_function(builder.module, function, _RECIPROCAL), [x, *more])
    off = multiply_add(builder, VECTOR, builder.fneg(x), guess, _number(1.0))
    return multiply_add(builder, VECTOR, off, guess, guess)


_BOUND = 8.0
"""Beyond it tanh is 1 to the last digit but one."""
_OVER = (9.99999981e-1, 1.29792329e-1, 2.98587202e-3, 9.87874993e-6, -1.47044848e-8, 2.35092845e-11)
_UNDER = (1.0, 4.63125490e-1, 2.40279663e-2, 2.37204612e-4)
"""tanh(x) = x over(x^2) / under(x^2) to 2e-8 within the bound: least squares of the relative error, weighted until all peaks are
alike."""


def _polynomial(builder: ir.IRBuilder, z: ir.Value, terms: tuple[float, ...]) -> ir.Value:
    *lower, value = (_number(term) for term in terms)
    for term in reversed(lower):
        value = multiply_add(builder, VECTOR, value, z, term)
    return value


@intrinsic
def tanh_in_place(typing, address, count):
    """To 4e-7, of `count` floats, a multiple of LANES. What is not a number stays none."""

    def generate(context, builder, signature, arguments):
        address, count = arguments

        def held(x, bound, how):
            return builder.select(builder.fcmp_ordered(how, x, _number(bound)), _number(bound), x)

        def run(index, carried):
            place = _place(builder, address, builder.mul(index, number(LANES)))
            x = held(held(builder.load(place, align=4), -_BOUND, "<"), _BOUND, ">")
            z = builder.fmul(x, x)
            over, under = _polynomial(builder, z, _OVER), _polynomial(builder, z, _UNDER)
            builder.store(builder.fmul(builder.fmul(x, over), _one_over(builder, under)), place, align=4)
            return carried

        counted(builder, number(0), builder.sdiv(count, number(LANES)), [], run)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def relu_in_place(typing, address, count):
    """Of `count` floats, a multiple of LANES. What is not a number stays none."""

    def generate(context, builder, signature, arguments):
        address, count = arguments

        def run(index, carried):
            place = _place(builder, address, builder.mul(index, number(LANES)))
            x = builder.load(place, align=4)
            builder.store(builder.select(builder.fcmp_ordered("<", x, _number(0.0)), _number(0.0), x), place, align=4)
            return carried

        counted(builder, number(0), builder.sdiv(count, number(LANES)), [], run)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def set_rows(typing, out, row, rows, width):
    """Each of `rows` rows of `out` becomes `row`, of `width` floats, a multiple of LANES."""

    def generate(context, builder, signature, arguments):
        out, row, rows, width = arguments

        def column(index, carried):
            at = builder.mul(index, number(LANES))
            value = builder.load(_place(builder, row, at), align=4)

            def one(i, carried):
                builder.store(value, _place(builder, out, builder.add(builder.mul(i, width), at)), align=4)
                return carried

            counted(builder, number(0), rows, [], one)
            return carried

        counted(builder, number(0), builder.sdiv(width, number(LANES)), [], column)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def pass_back(typing, due, made, sums, rows, width, activation):
    """Gradients `due` [rows, width] of an activation's results `made` become those of what it was given, whose sums over the
    rows are added to `sums` [width], a multiple of LANES wide."""

    def generate(context, builder, signature, arguments):
        due, made, sums, rows, width, activation = arguments
        is_tanh = builder.icmp_signed("==", activation, number(TANH))

        def column(index, carried):
            at = builder.mul(index, number(LANES))
            total_place = _place(builder, sums, at)

            def one(i, totals):
                where = builder.add(builder.mul(i, width), at)
                value = builder.load(_place(builder, made, where), align=4)
                place = _place(builder, due, where)
                after = builder.load(place, align=4)
                of_tanh = multiply_add(builder, VECTOR, builder.fneg(value), value, _number(1.0))
                rises = builder.fcmp_ordered(">", value, _number(0.0))
                of_relu = builder.select(rises, _number(1.0), _number(0.0))
                before = builder.fmul(after, builder.select(is_tanh, of_tanh, of_relu))
                builder.store(before, place, align=4)
                return [builder.fadd(totals[0], before)]

            (total,) = counted(builder, number(0), rows, [builder.load(total_place, align=4)], one)
            builder.store(total, total_place, align=4)
            return carried

        counted(builder, number(0), builder.sdiv(width, number(LANES)), [], column)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate
