"""Memory in large pages, for what is read from end to end again and again.

In pages of 4 KiB a processor looks up an address for each of them, and its look-ahead ends there: a pass over the weights of
a small language model was 8% slower (`benchmarks/engine_profile.py`). Temporary tensors are better off without: they are
cleared anew each time.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

LARGE = 1 << 21
"""Bytes of a large page of x86 and ARM processors."""
_LINE = 64


class LargePages:
    """A piece of memory to be shared out, made when something is taken first. What was taken lives on when this is gone; what
    was not costs nothing."""

    def __init__(self, size: int) -> None:
        """size: in bytes"""
        self._size = size
        self._memory: torch.Tensor | None = None
        self._taken = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Not cleared. From elsewhere when nothing is left, or the system gives no such memory."""
        size = math.prod(shape) * dtype.itemsize
        start = self._taken + -self._taken % _LINE
        if size and start + size <= self._size:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                if self._memory is None:
                    self._memory = _in_large_pages(self._size)
                self._taken = start + size
                return self._memory[start : start + size].view(dtype).view(*shape)
        return torch.empty(*shape, dtype=dtype)


def _in_large_pages(size: int) -> torch.Tensor:
    """[size] bytes that begin with a large page; where the system does not take the advice, pages stay small."""
    memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % LARGE :][:size]
