"""Memory in large pages, for what is read from end to end again and again.

In pages of 4 KiB a processor looks up an address for each of them, and its look-ahead ends there: a pass over the weights of
a small language model was 8% slower (`benchmarks/engine_profile.py`). Temporary tensors are better off without: they are
cleared anew each time.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence

import torch

LARGE = 1 << 21
"""Bytes of a large page of x86 and ARM processors."""
_LINE = 64
_ADVISE_LARGE = 14
"""MADV_HUGEPAGE of Linux."""


class LargePages:
    """A piece of memory to be shared out. What was taken lives on when this is gone; what was not costs nothing."""

    def __init__(self, size: int) -> None:
        """size: in bytes"""
        memory = torch.empty(size + 2 * LARGE, dtype=torch.uint8)
        self._memory = memory[-memory.data_ptr() % LARGE :]
        self._taken = 0
        if sys.platform == "linux":  # where the system does not take the advice, pages stay small
            whole = self._memory.numel() // LARGE * LARGE
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_size_t(whole), _ADVISE_LARGE)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Not cleared. From elsewhere when nothing is left."""
        size = math.prod(shape) * dtype.itemsize
        start = self._taken + -self._taken % _LINE
        if start + size > self._memory.numel():
            return torch.empty(*shape, dtype=dtype)
        self._taken = start + size
        return self._memory[start : self._taken].view(dtype).view(*shape)
