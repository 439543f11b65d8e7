"""Runs parts of one work side by side, each with a core of its own.

Threads inside each product meet at its end, a few hundred times in a forward pass, and whoever is held up for a moment holds
up all. Parts with rows of their own, on one thread each, meet once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
WORTH_MEETING = 1 << 26
"""Multiplications of a pass (weights times rows) from which on threads that share each of its products save more than
their meetings cost. Beside a process that holds a core, each meeting waits for the scheduler: a small pass then takes
thirty times as long as on one thread."""


_PIECE = 1 << 20
"""Numbers that are copied between two rests."""
RESTS = 2
"""How many times as long a rest is as what was done before it."""
_thread = threading.local()


def work_beside(busy: Callable[[], bool]) -> None:
    """Let the calling thread stand back behind passes: a lower priority, and in `copy_beside` rests while they are `busy`. A
    pass that shares its cores takes twice as long otherwise, as its steps wait for whichever thread was held up."""
    _thread.busy = busy
    with contextlib.suppress(OSError, AttributeError):  # threads have priorities of their own on Linux alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)


def copy_beside(into: torch.Tensor, source: torch.Tensor) -> None:
    """into = source, as `in_pieces` does it."""
    if into.dim() == 0:
        into.copy_(source)
    else:
        in_pieces(into.shape[0], into.numel(), lambda first, last: into[first:last].copy_(source[first:last]))


def in_pieces(rows: int, numbers: int, work: Callable[[int, int], object]) -> None:
    """`work(first, last)` over all rows, which hold so many numbers together. A thread that works beside passes does so in
    pieces, and rests after each for `RESTS` times as long as it took."""
    busy = getattr(_thread, "busy", None)
    if busy is None or numbers <= _PIECE // 4:
        work(0, rows)
        return
    piece = max(1, _PIECE * rows // numbers)
    for first in range(0, rows, piece):
        began = time.perf_counter()
        work(first, min(first + piece, rows))
        if busy():
            time.sleep(RESTS * (time.perf_counter() - began))


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """One thread for passes of so few, else those that the caller may use."""
    own = torch.get_num_threads()
    if own == 1 or multiplications >= WORTH_MEETING:
        yield
        return
    use_threads(1)
    try:
        yield
    finally:
        use_threads(own)


class Crew:
    """Threads, with a core each, that run parts of a work. They end with it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def run(self, calls: list[Callable[[], T]]) -> list[T]:
        """All results, in order; the first failure, once all have ended."""
        return self._side_by_side(calls) if len(calls) > 1 else [calls[0]()]

    def _side_by_side(self, calls: list[Callable[[], T]]) -> list[T]:
        own = torch.get_num_threads()
        self._pool = self._pool or ThreadPoolExecutor(os.cpu_count(), "part")
        futures = [self._pool.submit(_on_one_core, call) for call in calls]
        wait(futures)
        torch.set_num_threads(own)  # threads that begin later begin with what was said last, by whichever thread
        return [future.result() for future in futures]


def _on_one_core(call: Callable[[], T]) -> T:
    use_threads(1)
    return call()


def use_threads(count: int) -> None:
    """Threads of the products that the calling thread runs; 0 leaves them as they are."""
    if count:
        # A thread's first question settles its number at what any thread set last; after it only the thread itself does.
        torch.get_num_threads()
        torch.set_num_threads(count)
