"""Turns a list of named shapes into arrays that a process and its children share, without a name in any folder."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping

import numpy as np

from headrace.types import Array

Layout = dict[str, tuple[tuple[int, ...], str]]
"""Name -> shape and dtype."""

_ALIGN_BYTES = 64


def create(layout: Layout) -> tuple[int, dict[str, Array]]:
    """A file descriptor to hand to a child, and the arrays, all zero. The memory goes with the last process that has it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headrace-arena")
    else:
        descriptor, path = tempfile.mkstemp(prefix="headrace-arena-")
        os.unlink(path)
    os.ftruncate(descriptor, max(1, sum(_size(*entry) for entry in layout.values())))
    return descriptor, attach(descriptor, layout)


def attach(descriptor: int, layout: Layout) -> dict[str, Array]:
    """The arrays that `create` made, in another process."""
    memory = mmap.mmap(descriptor, 0)
    arrays, offset = {}, 0
    for name, (shape, dtype) in layout.items():
        arrays[name] = np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
        offset += _size(shape, dtype)
    return arrays


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGN_BYTES) * _ALIGN_BYTES


def take(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Those whose name begins so, without the prefix."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
