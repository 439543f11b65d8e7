"""Engines and trainer in turns on one set of devices: who leaves makes room before the other comes (`placement = "colocated"`).

to_training      close the gate, interrupt what runs, engines sleep (weights and cache go), trainer loads its state
to_generation    trainer gives its state away, engines wake; the sync that follows brings them weights and opens the gate
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headrace.errors import PartFailed
from headrace.orchestrator.dispatcher import EngineSlot, with_deadline
from headrace.orchestrator.weight_sync import WeightSync
from headrace.protocols import Proxy
from headrace.types import Metrics, Stat

SLEEP_LEVEL = 2
"""The weights go too: new ones come with the sync that every turn ends in."""


class Turns:
    """Takes turns between `sync`'s engines and the `trainer`, and measures the peak memory of each turn."""

    def __init__(self, sync: WeightSync, trainer: Proxy) -> None:
        self.sync, self.dispatcher, self.trainer = sync, sync.dispatcher, trainer
        self.peaks: dict[str, int] = {}

    async def to_training(self) -> None:
        self.dispatcher.close_gate()
        if self.sync.interruption.drain:
            await self.sync.drain()
        elif self.sync.interruption.running == "abort":
            await self.dispatcher.abort_all()
            await self.dispatcher.drained()
        await self._engines("sleep", SLEEP_LEVEL)
        self._turn_ends("generation")
        await self.trainer.onload()

    async def to_generation(self) -> None:
        await self.trainer.offload()
        self._turn_ends("training")
        await self._engines("wake")

    async def _engines(self, method: str, *arguments: Any) -> None:
        for slot in self.dispatcher.live():
            await self._ask(slot, method, arguments)

    async def _ask(self, slot: EngineSlot, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            call = getattr(slot.proxy, method)(*arguments)
            await with_deadline(call, self.sync.commit_timeout_s, f"{slot.name}.{method}")
        except PartFailed as error:
            self.dispatcher.fence(slot, f"{method}: {error}")

    def _turn_ends(self, turn: str) -> None:
        """Note the turn's peak: the sum over processes, each at its own highest moment."""
        pids = {os.getpid(), self.trainer.pid, *(slot.proxy.pid for slot in self.dispatcher.live())}
        self.peaks[turn] = sum(take_peak(pid) for pid in pids if pid is not None)

    def metrics(self) -> Metrics:
        return {f"memory/{turn}_peak_gb": Stat(peak / 1e9) for turn, peak in self.peaks.items() if peak}


def take_peak(pid: int) -> int:
    """A process's most resident bytes since the last call (Linux; 0 where the kernel does not tell), and start anew."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
