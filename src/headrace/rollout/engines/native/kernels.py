"""Turns the steps of a pass into compiled loops over units of work, which the threads of a team take in turn (`team`).

As operations of torch the steps between matrix products are some sixty calls a layer, each of which wakes all threads for a
few microseconds of work. Here one call is one step, and a thread that is held up elsewhere is not waited for. A row reads its
keys and values where they lie, block by block, so nothing is gathered or padded (paged attention: Kwon et al. 2023), and no
result depends on what else is in the pass. Not a number stays not a number: the loops may be reordered, but assume nothing
of values.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray, njit

from headrace.vectors import (
    BFLOAT16,
    BYTES,
    FLOAT,
    INT8,
    LINE,
    MOST_ROWS,
    PANEL,
    add_to_word,
    attention_loops,
    float_of_bits,
    floats_at,
    give_way,
    integers_at,
    panel_product,
    read_word,
    replace_word,
    write_word,
)

_LOOPS = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
_f = np.float32

# What lies where on a team's board of whole numbers. Words that threads write lie in cache lines of their own.
TAKEN, ENDED, OPEN, JOB = 0, 8, 16, 24
LENGTH = JOB + 16
NORM, PLACE, ATTEND, GATE, PRODUCT = range(5)
"""Kinds of step."""
_SPANS = 8
"""Rows of a cheap step are taken in so many spans."""
_CACHED_ROWS_BYTES, _CACHED_INPUTS = 1 << 19, 2048
"""What of a product's rows, and of its inputs, is run through before the next: weights stay in cache meanwhile."""
_AHEAD = 2048
"""Bytes of weights that are asked for before their turn: the processor's own look-ahead ends at each page."""
_STRETCHES = 4
"""Stretches of panels for each thread."""
_PATIENCE = 2000
"""Looks at a word before the core is offered to others."""

_float_product, _bfloat16_product, _int8_product = (panel_product(form) for form in (FLOAT, BFLOAT16, INT8))
_bytes = np.array([BYTES[FLOAT], BYTES[BFLOAT16], BYTES[INT8]])


@njit(inline="always", **_LOOPS)
def exp(x):
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
    return (p * r * r + r + _f(1.0)) * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


# ---------------------------------------------------------------------------------------------------------- the steps
# Each takes a job, its numbers in the order in which its docstring names them (addresses of what is no number), and does
# one unit of it. [N, ...] are the pass's rows; all arrays are contiguous.


@njit(**_LOOPS)
def _norm(job, first, last):
    """`x += more`, and the RMS norm of that into `out` (Zhang & Sennrich 2019).

    x, more [N, W]; weight [W]; out [N, W]; W; bits of epsilon
    """
    width, eps = job[5], float_of_bits(np.int32(job[6]))
    weight = carray(floats_at(job[3]), width)
    for i in range(first, last):
        at = 4 * i * width
        x, more = carray(floats_at(job[1] + at), width), carray(floats_at(job[2] + at), width)
        out = carray(floats_at(job[4] + at), width)
        total = _f(0.0)
        for j in range(width):
            value = x[j] + more[j]
            x[j] = value
            total += value * value
        scale = _f(1.0) / np.sqrt(total / _f(width) + eps)
        for j in range(width):
            out[j] = x[j] * scale * weight[j]


@njit(**_LOOPS)
def _gate(job, first, last):
    """SwiGLU (Shazeer 2020): silu of the first half of each row times the second. rows [N, 2 W]; out [N, W]; W"""
    width = job[3]
    for i in range(first, last):
        row = carray(floats_at(job[1] + 8 * i * width), 2 * width)
        out = carray(floats_at(job[2] + 4 * i * width), width)
        for j in range(width):
            value = row[j]
            silu = value / (_f(1.0) + exp(-value)) if value > _f(-88.0) else value * _f(0.0)
            out[j] = silu * row[width + j]


@njit(inline="always", **_LOOPS)
def _norm_head(head, weight, eps):
    total = _f(0.0)
    for j in range(head.shape[0]):
        total += head[j] * head[j]
    scale = _f(1.0) / np.sqrt(total / _f(head.shape[0]) + eps)
    for j in range(head.shape[0]):
        head[j] *= scale * weight[j]


@njit(**_LOOPS)
def _place(job, first, last):
    """Rotate queries in place and write rotated keys, and values, where they are kept.

    qkv [N, heads + 2 kv_heads, D]; cos, sin [context, D], the first half of sin negated; positions, slots [N];
    query_norm, key_norm [D] of norms before rotating, or 0; keys, values [slots, kv_heads, D]; heads; kv_heads; D;
    bits of epsilon
    """
    heads, kv_heads, size, eps = job[10], job[11], job[12], float_of_bits(np.int32(job[13]))
    half, parts = size // 2, heads + 2 * kv_heads
    for i in range(first, last):
        at, slot = carray(integers_at(job[4]), last)[i], carray(integers_at(job[5]), last)[i]
        cos, sin = (carray(floats_at(job[2] + 4 * at * size), size), carray(floats_at(job[3] + 4 * at * size), size))
        for h in range(parts):
            head = carray(floats_at(job[1] + 4 * (i * parts + h) * size), size)
            k = h - heads if h < heads + kv_heads else h - heads - kv_heads
            if h >= heads + kv_heads:
                carray(floats_at(job[9] + 4 * (slot * kv_heads + k) * size), size)[:] = head
                continue
            if job[6]:
                _norm_head(head, carray(floats_at(job[6] if h < heads else job[7]), size), eps)
            into = head if h < heads else carray(floats_at(job[8] + 4 * (slot * kv_heads + k) * size), size)
            for j in range(half):
                one, two = head[j], head[j + half]
                into[j] = one * cos[j] + two * sin[j]
                into[j + half] = two * cos[j + half] + one * sin[j + half]


@cache
def _attend_for(size: int, shared: int):
    look, mix = attention_loops(size, shared)

    @njit(**_LOOPS)
    def attend(job, unit):
        """Softmax attention of one row, or of some of its heads, over the slots of its own sequence.

        qkv [N, heads + 2 kv_heads, D] queries in front; starts, counts [N] of each row's slots in `slots`; slots;
        keys, values [slots, kv_heads, D]; out [N, heads, D]; bits of the scale; kv_heads; parts of a row
        """
        kv_heads, parts, scale = job[9], job[10], float_of_bits(np.int32(job[8]))
        i, part = unit // parts, unit % parts
        first, last = kv_heads * part // parts, kv_heads * (part + 1) // parts
        count = carray(integers_at(job[3]), i + 1)[i]
        slots = job[4] + 8 * carray(integers_at(job[2]), i + 1)[i]
        stride = kv_heads * size
        scores = np.empty((shared, count), np.float32)
        for k in range(first, last):
            # With the first head's numbers come those of the others, which lie beside them.
            lines = max(1, (last - first) * size // LINE) if k == first else 1
            query = job[1] + 4 * size * (i * kv_heads * (shared + 2) + k * shared)
            head = 4 * k * size
            look(query, job[5] + head, slots, count, stride, scores.ctypes.data, count, lines)
            for h in range(shared):
                most = scores[h, 0]
                for t in range(count):
                    most = scores[h, t] if scores[h, t] > most else most
                most *= scale
                total = _f(0.0)
                for t in range(count):
                    below = scores[h, t] * scale - most
                    # What would vanish in rounding anyway: numbers under the normal range take a hundred times as long.
                    weight = _f(0.0) if below < _f(-80.0) else exp(below)
                    scores[h, t] = weight
                    total += weight
                for t in range(count):
                    scores[h, t] /= total
            out = job[7] + 4 * size * shared * (i * kv_heads + k)
            mix(scores.ctypes.data, job[6] + head, slots, count, stride, out, count, lines)

    return attend


@njit(**_LOOPS)
def _product(job, unit):
    """A span of rows times a stretch of panels, `vectors.panel_product`.

    x [N, inputs]; weights [panels, inputs, PANEL]; out [N, outputs]; scales [outputs] or 0; bias [outputs] or 0;
    N; inputs; outputs; form; spans; stretches
    """
    rows, outputs, spans, stretches = job[6], job[8], job[10], job[11]
    panels = outputs // PANEL
    span, stretch = unit // stretches, unit % stretches
    start, stop = rows * span // spans, rows * (span + 1) // spans
    end = panels * (stretch + 1) // stretches
    for panel in range(panels * stretch // stretches, end):
        _panel(job, panel, panel + 1 < end, start, stop)


@njit(**_LOOPS)
def _panel(job, panel, goes_on, start, stop):
    inputs, outputs, form = job[7], job[8], job[9]
    width = PANEL * _bytes[form]
    weights = job[2] + panel * inputs * width
    blocks, pieces = -(-(stop - start) // MOST_ROWS), -(-inputs // _CACHED_INPUTS)
    # While a panel is worked on, the next one is fetched from memory, a part of it beside each block of rows.
    ahead, step = weights + _AHEAD, width
    if goes_on:
        ahead, step = weights + inputs * width, width // blocks
    for piece in range(pieces):
        first, last = inputs * piece // pieces, inputs * (piece + 1) // pieces
        for block in range(blocks):
            at = start + (stop - start) * block // blocks
            count = start + (stop - start) * (block + 1) // blocks - at
            x, out = job[1] + 4 * at * inputs, job[3] + 4 * (at * outputs + panel * PANEL)
            soon = ahead + block * step * inputs if goes_on else ahead
            if form == FLOAT:
                _float_product(x, inputs, 1, weights, PANEL, out, outputs, count, first, last, piece == 0, soon, step)
            elif form == BFLOAT16:
                _bfloat16_product(
                    x, inputs, 1, weights, PANEL, out, outputs, count, first, last, piece == 0, soon, step
                )
            else:
                _int8_product(x, inputs, 1, weights, PANEL, out, outputs, count, first, last, piece == 0, soon, step)
    if job[4] or job[5]:
        for at in range(start, stop):
            out = carray(floats_at(job[3] + 4 * (at * outputs + panel * PANEL)), PANEL)
            if job[4]:
                scales = carray(floats_at(job[4] + 4 * panel * PANEL), PANEL)
                for j in range(PANEL):
                    out[j] *= scales[j]
            if job[5]:
                bias = carray(floats_at(job[5] + 4 * panel * PANEL), PANEL)
                for j in range(PANEL):
                    out[j] += bias[j]


# ------------------------------------------------------------------------------------------------------------ sharing


@cache
def loops_for(size: int, shared: int):
    """`lead(board, units, ...)` and `help_out(board)`, for heads of `size` numbers of which `shared` have one key."""
    attend = _attend_for(size, shared)

    @njit(**_LOOPS)
    def do(job, unit):
        kind = job[0]
        if kind == PRODUCT:
            _product(job, unit)
        elif kind == ATTEND:
            attend(job, unit)
        else:
            rows, spans = job[14], job[15]
            first, last = rows * unit // spans, rows * (unit + 1) // spans
            if kind == NORM:
                _norm(job, first, last)
            elif kind == PLACE:
                _place(job, first, last)
            else:
                _gate(job, first, last)

    @njit(**_LOOPS)
    def take(board, job):
        """Units of the job that is on, as long as there are any.

        One word says which job it is and how many of its units nobody has taken. Who takes one has read the job that it
        belongs to: the next job is not written before this one's units have all ended.
        """
        taken, ended = board.ctypes.data + 8 * TAKEN, board.ctypes.data + 8 * ENDED
        while True:
            word = read_word(taken)
            left = word & 0xFFFFFFFF
            if left == 0:
                return
            if replace_word(taken, word, word - 1):
                do(job, left - 1)
                add_to_word(ended, 1)

    @njit(**_LOOPS)
    def lead(board, units):
        """All units of the job on the board, with whoever helps."""
        job = board[JOB:]
        if not board[OPEN]:
            for unit in range(units - 1, -1, -1):
                do(job, unit)
            return
        taken, ended = board.ctypes.data + 8 * TAKEN, board.ctypes.data + 8 * ENDED
        write_word(ended, 0)
        write_word(taken, ((board[TAKEN] >> 32) + 1) << 32 | units)
        take(board, job)
        looks = 0
        while read_word(ended) < units:
            looks += 1
            if looks > _PATIENCE:
                give_way()

    @njit(**_LOOPS)
    def help_out(board):
        """Take units of whatever job comes, while the board is open."""
        job = board[JOB:]
        taken, is_open = board.ctypes.data + 8 * TAKEN, board.ctypes.data + 8 * OPEN
        looks = 0
        while read_word(is_open):
            if read_word(taken) & 0xFFFFFFFF:
                take(board, job)
                looks = 0
            looks += 1
            if looks > _PATIENCE:
                give_way()

    return lead, help_out


def spans_of(rows: int) -> int:
    return min(rows, _SPANS)


def product_stretches(panels: int, threads: int) -> int:
    return min(panels, _STRETCHES * threads)


def attention_parts(rows: int, kv_heads: int, threads: int) -> int:
    return 1 if rows >= 2 * threads else kv_heads


def product_spans(rows: int, inputs: int) -> int:
    """Spans of rows that stay in cache while all panels pass by."""
    most = max(MOST_ROWS, _CACHED_ROWS_BYTES // (4 * min(inputs, _CACHED_INPUTS)))
    return -(-rows // most)
