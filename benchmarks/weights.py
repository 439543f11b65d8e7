"""Weight channels against one-thread memcpy: 500 MB from a publisher to views in another process, interleaved medians.

    python benchmarks/weights.py [--megabytes 500] [--rounds 15]

A transfer is `publish` plus `read` in the reader's process, up to checked views of that version.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import statistics
import time
from dataclasses import dataclass

import torch

from headrace.exchange.channels import open_channel
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.protocols import WeightChannel, WorkerContext
from headrace.types import WeightTicket

LAYERS = 100
WARM_UP = 3  # both segments and the reader's mappings are fresh: their pages are being made


@dataclass(frozen=True, slots=True)
class Spent:
    """By the wall's clock, and by this thread's own: the second does not see what else the machine was doing."""

    wall_s: float
    cpu_s: float


class Clock:
    def __init__(self) -> None:
        self.wall_s, self.cpu_s = time.perf_counter(), time.thread_time()

    def spent(self) -> Spent:
        return Spent(time.perf_counter() - self.wall_s, time.thread_time() - self.cpu_s)


class Publisher:
    """Owns the weights; also times a plain copy of as many bytes, in the same process and the same round."""

    def __init__(self, context: WorkerContext, channel: WeightChannel, megabytes: int) -> None:
        torch.set_num_threads(1)
        self.channel = channel
        values = megabytes * 1_000_000 // 4
        self.source = torch.rand(values)
        self.copy = torch.zeros(values)
        per_layer = values // LAYERS
        self.tensors = [(f"layer.{i}", self.source[i * per_layer : (i + 1) * per_layer]) for i in range(LAYERS)]

    def publish(self, version: int) -> tuple[WeightTicket, Spent]:
        clock = Clock()
        ticket = self.channel.publish(self.tensors, version)
        return ticket, clock.spent()

    def memcpy(self) -> Spent:
        clock = Clock()
        ctypes.memmove(self.copy.data_ptr(), self.source.data_ptr(), self.source.numel() * 4)
        return clock.spent()


class Reader:
    def __init__(self, context: WorkerContext, channel: WeightChannel) -> None:
        torch.set_num_threads(1)
        self.channel = channel
        self.held: WeightTicket | None = None

    def read(self, ticket: WeightTicket) -> Spent:
        clock = Clock()
        views = self.channel.read(ticket)
        spent = clock.spent()
        assert len(views) == LAYERS
        if self.held is not None:
            self.channel.release(self.held)
        self.held = ticket
        return spent


async def across_processes(megabytes: int, rounds: int) -> dict[str, float]:
    runtime = ProcessRuntime(lambda event: None)
    channel = open_channel("shared_memory")
    publisher = await runtime.spawn("publisher", Publisher, channel, megabytes)
    reader = await runtime.spawn("reader", Reader, channel)
    memcpy, publish, read = [], [], []
    for version in range(rounds + WARM_UP):
        memcpy.append(await publisher.memcpy())
        ticket, spent = await publisher.publish(version)
        publish.append(spent)
        read.append(await reader.read(ticket))
    await runtime.close()
    return summary("shared_memory", megabytes, memcpy, publish, read)


def in_process(megabytes: int, rounds: int) -> dict[str, float]:
    publisher = Publisher(None, open_channel("in_process"), megabytes)
    reader = Reader(None, publisher.channel)
    memcpy, publish, read = [], [], []
    for version in range(rounds + WARM_UP):
        memcpy.append(publisher.memcpy())
        ticket, spent = publisher.publish(version)
        publish.append(spent)
        read.append(reader.read(ticket))
    return summary("in_process", megabytes, memcpy, publish, read)


def summary(
    name: str, megabytes: int, memcpy: list[Spent], publish: list[Spent], read: list[Spent]
) -> dict[str, float]:
    first = publish[0].wall_s + read[0].wall_s
    memcpy, publish, read = memcpy[WARM_UP:], publish[WARM_UP:], read[WARM_UP:]
    found = {f"{name}_first_transfer_s": first}
    for clock in ("wall_s", "cpu_s"):
        copies = [getattr(spent, clock) for spent in memcpy]
        transfers = [getattr(p, clock) + getattr(r, clock) for p, r in zip(publish, read, strict=True)]
        found[f"{name}_memcpy_gb_per_{clock}"] = megabytes / 1e3 / statistics.median(copies)
        found[f"{name}_gb_per_{clock}"] = megabytes / 1e3 / statistics.median(transfers)
        found[f"{name}_of_memcpy_by_{clock}"] = statistics.median(c / t for c, t in zip(copies, transfers, strict=True))
        found[f"{name}_read_{clock}"] = statistics.median(getattr(spent, clock) for spent in read)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    result = asyncio.run(across_processes(options.megabytes, options.rounds))
    result |= in_process(options.megabytes, options.rounds)
    print(json.dumps({name: round(value, 4) for name, value in result.items()}, indent=2))
