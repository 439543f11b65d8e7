"""Runs parts of one work side by side, each with a core of its own.

Threads inside each product meet at its end, a few hundred times in a forward pass, and whoever is held up for a moment holds
up all. Parts with rows of their own, on one thread each, meet once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")


class Crew:
    """As many threads as the caller may use, with a core each, that run parts of a work. They end with it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def run(self, calls: list[Callable[[], T]]) -> list[T]:
        """All results, in order; the first failure, once all have ended."""
        return self._side_by_side(calls) if len(calls) > 1 else [calls[0]()]

    def _side_by_side(self, calls: list[Callable[[], T]]) -> list[T]:
        own = torch.get_num_threads()
        self._pool = self._pool or ThreadPoolExecutor(own, "part")
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
