"""Turns the steps of a pass into compiled loops over units of work, which the threads of a team take in turn (`team`).

As operations of torch the steps between matrix products are some sixty calls a layer, each of which wakes all threads for a
few microseconds of work. Here one call is one step, and a thread that is held up elsewhere is not waited for. A row reads its
keys and values where they lie, block by block, so nothing is gathered or padded (paged attention: Kwon et al. 2023), and no
result depends on what else is in the pass. Not a number stays not a number: the loops may be reordered, but assume nothing
of values.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit

from headrace.vectors import (
    BYTES,
    LINE,
    MOST_ROWS,
    OPTIONS,
    PANEL,
    add_to_word,
    call,
    compiled,
    float_of_bits,
    floats_at,
    give_way,
    integers_at,
    panel_product,
    read_word,
    replace_word,
    token_mix,
    token_scores,
    write_word,
)

_f = np.float32

# What lies where on a team's board of whole numbers. Words that threads write lie in cache lines of their own.
TAKEN, ENDED, OPEN, JOB, NUMBERS = 0, 8, 16, 24, 16
SETTLED = JOB + NUMBERS
"""Units of a job that others of it wait for and that have ended."""
LENGTH = SETTLED + 8
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


@njit(inline="always", **OPTIONS)
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
# Each takes the address of a job, its numbers in the order in which its docstring names them (addresses of what is no
# number), and does one unit of it. [N, ...] are the pass's rows; all arrays are contiguous. A job's first number is the
# address of its step.


@njit(inline="always", **OPTIONS)
def _rows_of(job, unit):
    """First and last of a unit that is a span of rows."""
    rows, spans = job[14], job[15]
    return rows * unit // spans, rows * (unit + 1) // spans


@compiled(2)
def norm(address, unit):
    """`x += more`, and the RMS norm of that into `out` (Zhang & Sennrich 2019).

    x, more [N, W]; weight [W]; out [N, W]; W; bits of epsilon
    """
    job = carray(integers_at(address), NUMBERS)
    first, last = _rows_of(job, unit)
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


@compiled(2)
def gate(address, unit):
    """SwiGLU (Shazeer 2020): silu of the first half of each row times the second. rows [N, 2 W]; out [N, W]; W"""
    job = carray(integers_at(address), NUMBERS)
    first, last = _rows_of(job, unit)
    width = job[3]
    for i in range(first, last):
        row = carray(floats_at(job[1] + 8 * i * width), 2 * width)
        out = carray(floats_at(job[2] + 4 * i * width), width)
        for j in range(width):
            value = row[j]
            silu = value / (_f(1.0) + exp(-value)) if value > _f(-88.0) else value * _f(0.0)
            out[j] = silu * row[width + j]


@njit(inline="always", **OPTIONS)
def _norm_head(head, weight, eps):
    total = _f(0.0)
    for j in range(head.shape[0]):
        total += head[j] * head[j]
    scale = _f(1.0) / np.sqrt(total / _f(head.shape[0]) + eps)
    for j in range(head.shape[0]):
        head[j] *= scale * weight[j]


@njit(**OPTIONS)
def _rotate(head, cos, sin, out):
    half = head.shape[0] // 2
    for j in range(half):
        one, two = head[j], head[j + half]
        out[j] = one * cos[j] + two * sin[j]
        out[j + half] = two * cos[j + half] + one * sin[j + half]


@compiled(2)
def place(address, unit):
    """Rotate queries in place and write rotated keys, and values, where they are kept.

    qkv [N, heads + 2 kv_heads, D]; cos, sin [context, D], the first half of sin negated; positions, slots [N];
    query_norm, key_norm [D] of norms before rotating, or 0; keys, values [slots, kv_heads, D]; heads; kv_heads; D;
    bits of epsilon
    """
    job = carray(integers_at(address), NUMBERS)
    first, last = _rows_of(job, unit)
    heads, kv_heads, size, eps = job[10], job[11], job[12], float_of_bits(np.int32(job[13]))
    positions, slots = carray(integers_at(job[4]), last), carray(integers_at(job[5]), last)
    for i in range(first, last):
        cos, sin = (
            carray(floats_at(job[2] + 4 * positions[i] * size), size),
            carray(floats_at(job[3] + 4 * positions[i] * size), size),
        )
        row = job[1] + 4 * i * (heads + 2 * kv_heads) * size
        kept = 4 * slots[i] * kv_heads * size
        for h in range(heads + kv_heads):
            head = row + 4 * h * size
            if job[6]:
                weight = job[6] if h < heads else job[7]
                _norm_head(carray(floats_at(head), size), carray(floats_at(weight), size), eps)
            into = head if h < heads else job[8] + kept + 4 * (h - heads) * size
            _rotate(carray(floats_at(head), size), cos, sin, carray(floats_at(into), size))
        values = carray(floats_at(row + 4 * (heads + kv_heads) * size), kv_heads * size)
        into = carray(floats_at(job[9] + kept), kv_heads * size)
        for j in range(kv_heads * size):
            into[j] = values[j]


@cache
def attend_for(size: int, shared: int) -> Any:
    """The step that attends, for heads of `size` numbers of which `shared` have one key."""

    @compiled(2)
    def attend(address, unit):
        """Softmax attention of one row, or of some of its heads, over the slots of its own sequence.

        qkv [N, heads + 2 kv_heads, D] queries in front; starts, counts [N] of each row's slots in `slots`; slots;
        keys, values [slots, kv_heads, D]; out [N, heads, D]; bits of the scale; kv_heads; parts of a row
        """
        job = carray(integers_at(address), NUMBERS)
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
            token_scores(query, job[5] + head, slots, count, stride, scores.ctypes.data, count, lines, size, shared)
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
            token_mix(scores.ctypes.data, job[6] + head, slots, count, stride, out, count, lines, size, shared)

    return attend


@cache
def product_for(form: int) -> Any:
    """The step that multiplies, from weights in one form."""
    width = PANEL * BYTES[form]

    @compiled(2)
    def product(address, unit):
        """A span of rows times a stretch of panels, `vectors.panel_product`.

        x [N, inputs]; weights [panels, inputs, PANEL]; out [N, outputs]; scales [outputs] or 0; bias [outputs] or 0;
        N; inputs; outputs; spans; stretches
        """
        job = carray(integers_at(address), NUMBERS)
        rows, inputs, outputs, spans, stretches = job[6], job[7], job[8], job[9], job[10]
        panels = outputs // PANEL
        span, stretch = unit // stretches, unit % stretches
        start, stop = rows * span // spans, rows * (span + 1) // spans
        blocks, pieces = -(-(stop - start) // MOST_ROWS), -(-inputs // _CACHED_INPUTS)
        end = panels * (stretch + 1) // stretches
        for panel in range(panels * stretch // stretches, end):
            weights = job[2] + panel * inputs * width
            # While a panel is worked on, the next one is fetched from memory, a part of it beside each block of rows.
            goes_on = panel + 1 < end
            step = width // blocks if goes_on else width
            for piece in range(pieces):
                first, last = inputs * piece // pieces, inputs * (piece + 1) // pieces
                for block in range(blocks):
                    at = start + (stop - start) * block // blocks
                    count = start + (stop - start) * (block + 1) // blocks - at
                    x, out = job[1] + 4 * at * inputs, job[3] + 4 * (at * outputs + panel * PANEL)
                    ahead = weights + (inputs * width + block * step * inputs if goes_on else _AHEAD)
                    panel_product(
                        x, inputs, 1, weights, PANEL, out, outputs, count, first, last, piece == 0, ahead, step, form
                    )
            if job[4] or job[5]:
                for at in range(start, stop):
                    _finish(job, panel, job[3] + 4 * (at * outputs + panel * PANEL))

    return product


@njit(**OPTIONS)
def _finish(job, panel, row):
    out = carray(floats_at(row), PANEL)
    if job[4]:
        scales = carray(floats_at(job[4] + 4 * panel * PANEL), PANEL)
        for j in range(PANEL):
            out[j] *= scales[j]
    if job[5]:
        bias = carray(floats_at(job[5] + 4 * panel * PANEL), PANEL)
        for j in range(PANEL):
            out[j] += bias[j]


# ------------------------------------------------------------------------------------------------------------ sharing


@njit(inline="always", **OPTIONS)
def wait_for(address, least):
    """Until a word is as large as that."""
    looks = 0
    while read_word(address) < least:
        looks += 1
        if looks > _PATIENCE:
            give_way()


@njit(inline="always", **OPTIONS)
def _take(board):
    """Units of the job that is on, as long as there are any, those of the highest numbers first.

    One word says which job it is and how many of its units nobody has taken. Who takes one has read the job that it belongs
    to: the next job is not written before this one's units have all ended.
    """
    taken, ended, job = board + 8 * TAKEN, board + 8 * ENDED, board + 8 * JOB
    word = read_word(taken)
    while word & 0xFFFFFFFF:
        if replace_word(taken, word, word - 1):
            call(read_word(job), (job, (word & 0xFFFFFFFF) - 1))
            add_to_word(ended, 1)
        word = read_word(taken)


@njit(nogil=True, **OPTIONS)
def lead(board, units):
    """All units of the job on the board, with whoever helps. board: an address"""
    taken, ended, job = board + 8 * TAKEN, board + 8 * ENDED, board + 8 * JOB
    write_word(board + 8 * SETTLED, 0)
    if not read_word(board + 8 * OPEN):
        for unit in range(units - 1, -1, -1):
            call(read_word(job), (job, unit))
        return
    write_word(ended, 0)
    write_word(taken, ((read_word(taken) >> 32) + 1) << 32 | units)
    _take(board)
    wait_for(ended, units)


@njit(nogil=True, **OPTIONS)
def help_out(board):
    """Take units of whatever job comes, while the board is open."""
    looks = 0
    while read_word(board + 8 * OPEN):
        if read_word(board + 8 * TAKEN) & 0xFFFFFFFF:
            _take(board)
            looks = 0
        looks += 1
        if looks > _PATIENCE:
            give_way()


def spans_of(rows: int) -> int:
    return min(rows, _SPANS)


def product_stretches(panels: int, threads: int) -> int:
    return min(panels, _STRETCHES * threads)


def attention_parts(rows: int, kv_heads: int, threads: int) -> int:
    return 1 if rows >= 8 * threads else kv_heads


def product_spans(rows: int, inputs: int) -> int:
    """Spans of rows that stay in cache while all panels pass by."""
    most = max(MOST_ROWS, _CACHED_ROWS_BYTES // (4 * min(inputs, _CACHED_INPUTS)))
    return -(-rows // most)
