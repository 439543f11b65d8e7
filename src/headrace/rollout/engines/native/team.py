"""Lets all cores that an engine may use take part in each step of its passes.

Threads inside each product of a library meet at its end, and whoever is held up for a moment holds up all. Here a step is cut
into units that threads take one at a time: who is held up takes fewer, and before it has taken one nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from headrace.cores import WORTH_MEETING, threads_for
from headrace.rollout.engines.native import kernels


class Team:
    """The thread that runs a pass, and helpers while it does. One pass at a time."""

    def __init__(self) -> None:
        self._board = np.zeros(kernels.LENGTH, np.int64)
        self._job = self._board[kernels.JOB :]
        self._pool: ThreadPoolExecutor | None = None
        self._helpers: list[Future[None]] = []
        self._rooms: dict[tuple[str, int], torch.Tensor] = {}
        self.threads = 1
        self._address = self._board.ctypes.data
        kernels.lead(self._address, 0)  # compiled here, or read from where it was kept, before anybody waits
        kernels.help_out(self._address)

    @contextmanager
    def gathered(self, multiplications: int) -> Iterator[None]:
        """Helpers on as many threads as the caller's products may use, if the pass has so many multiplications that they
        are worth it. The caller's own operations of torch have one thread meanwhile."""
        own = torch.get_num_threads()
        if own == 1 or multiplications < WORTH_MEETING:
            with threads_for(0):
                yield
            return
        self._pool = self._pool or ThreadPoolExecutor(None, "team")
        self.threads, self._board[kernels.OPEN] = own, 1
        # A helper that has not yet seen the end of the last pass goes on in this one.
        self._helpers = [one for one in self._helpers if not one.done()]
        while len(self._helpers) < own - 1:
            self._helpers.append(self._pool.submit(_help, self._board))
        try:
            with threads_for(0):
                yield
        finally:
            self.threads, self._board[kernels.OPEN] = 1, 0
            self._helpers = [one for one in self._helpers if not one.cancel()]

    def room(self, use: str, rows: int, width: int) -> torch.Tensor:
        """[rows, width] of float32, the same memory for all steps of one use: what was there is gone, but it is in cache."""
        room = self._rooms.get((use, width))
        if room is None or room.shape[0] < rows:
            room = self._rooms[use, width] = torch.empty(rows, width)
        return room[:rows]

    def run(self, step: int, units: int, numbers: Sequence[int]) -> None:
        """One step, by the address of its loop: `kernels` says what its numbers are."""
        self._job[0] = step
        self._job[1 : 1 + len(numbers)] = numbers
        kernels.lead(self._address, units)

    def by_rows(self, step: int, rows: int, numbers: Sequence[int]) -> None:
        """A step whose units are spans of rows."""
        self._job[14], self._job[15] = rows, kernels.spans_of(rows)
        self.run(step, kernels.spans_of(rows), numbers)


def _help(board: np.ndarray) -> None:
    """Holds the board for as long as it is looked at: its team may be gone by then."""
    kernels.help_out(board.ctypes.data)
