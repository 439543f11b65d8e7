"""Weight syncs beside one-thread memcpy: every channel, scope and number of receivers; medians of interleaved pairs.

    python benchmarks/weights.py [--megabytes 500] [--rounds 11] [--channels ...] [--receivers 1,3] [--scopes ...]
    python benchmarks/weights.py --sparsity smollm2 [--steps 8]

A sync is `publish` in one process and, at the same time in each receiver's process, `read` up to checked tensors of that
version. In each round the publisher's process also copies as many bytes by memcpy. GB/s count the model's bytes once a
receiver, whatever travelled.

    full       float32 weights, all of them new
    changed    bfloat16 weights of which --share have changed: positions and values travel
    adapter    a hundredth of the bytes, under scope "adapter"

`--lora MODEL` syncs a real trainer with a real engine, each in its own process, through shared memory: all weights, adapters
merged into all weights, and adapters alone, with what either process holds and how fast the engine then decodes.

`--sparsity` says what share is realistic: it trains a real model (bfloat16 weights, float32 masters and AdamW, as
`model.dtype = bfloat16` does) on random advantages, and counts the bfloat16 values that a step has changed.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import statistics
import tempfile
import time
from typing import Any

import torch

from headrace.exchange.channels import AVAILABLE, open_channel
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.protocols import WeightChannel, WorkerContext
from headrace.types import WeightTicket

LAYERS = 100
WARM_UP = 3  # both versions' memory is fresh: its pages are being made
SCOPES = ("full", "changed", "adapter")


class Publisher:
    """Owns the weights; also times a plain copy of as many bytes, in the same process and the same round."""

    def __init__(self, context: WorkerContext | None, megabytes: int, share: float) -> None:
        torch.set_num_threads(1)
        self.share = share
        self.bytes = megabytes * 1_000_000 // 4 * 4
        self.source = torch.rand(self.bytes // 4)
        self.copy = torch.zeros(self.bytes // 4)

    def join(self, channel: WeightChannel, scope: str) -> None:
        self.channel, self.scope = channel, scope
        whole = self.source.view(torch.bfloat16) if scope == "changed" else self.source
        part = whole[: whole.numel() // 100] if scope == "adapter" else whole
        self.tensors = [(f"layer.{i}", piece) for i, piece in enumerate(part.chunk(LAYERS))]
        self.generator = torch.Generator().manual_seed(0)

    def publish(self, version: int) -> tuple[WeightTicket, float]:
        if self.scope == "changed":
            bits = self.source.view(torch.int16)
            places = torch.randint(0, bits.numel(), (int(bits.numel() * self.share),), generator=self.generator)
            bits[places] ^= 1
        started = time.perf_counter()
        scope = "adapter" if self.scope == "adapter" else "full"
        ticket = self.channel.publish(self.tensors, version, "main", scope)
        return ticket, time.perf_counter() - started

    def memcpy(self) -> float:
        started = time.perf_counter()
        ctypes.memmove(self.copy.data_ptr(), self.source.data_ptr(), self.bytes)
        return time.perf_counter() - started

    def leave(self) -> None:
        self.channel.close()


class Reader:
    def __init__(self, context: WorkerContext | None) -> None:
        torch.set_num_threads(1)

    def join(self, channel: WeightChannel, scope: str) -> None:
        self.channel = channel

    def read(self, ticket: WeightTicket) -> int:
        """As an engine does: what it needs is copied before the release (that copy is not part of the sync)."""
        count = len(self.channel.read(ticket))
        self.channel.release(ticket)
        return count

    def leave(self) -> None:
        self.channel.close()


async def measure(publisher: Any, readers: list[Any], kind: str, scope: str, options: argparse.Namespace) -> str:
    """One row: the syncs of a channel, each beside a memcpy."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        channel = open_channel(
            kind, folder=folder, scope="changed" if scope == "changed" else "full", full_every=1 << 30
        )
        parties = [publisher, *readers]
        for party in parties:
            await party.join(channel, scope)
        copies, publishes, syncs, sent = [], [], [], 0
        for version in range(options.rounds + WARM_UP):
            copies.append(await publisher.memcpy())
            ticket, spent = await publisher.publish(version)
            started = time.perf_counter()
            await asyncio.gather(*(reader.read(ticket) for reader in readers))
            publishes.append(spent)
            syncs.append(spent + time.perf_counter() - started)
            sent = ticket.bytes
        for party in parties:
            await party.leave()
    copies, publishes, syncs = copies[WARM_UP:], publishes[WARM_UP:], syncs[WARM_UP:]
    size = options.megabytes / 1e3
    ratios = [copy * len(readers) / sync for copy, sync in zip(copies, syncs, strict=True)]
    whole = f"{size * len(readers) / statistics.median(syncs):.2f}"
    return (
        f"| {kind} | {scope} | {len(readers)} | {sent / 1e6:,.1f} | {statistics.median(publishes):.3f} "
        f"| {statistics.median(syncs):.3f} | {whole if scope != 'adapter' else ''} "
        f"| {f'{statistics.median(ratios):.0%} ({min(ratios):.0%}-{max(ratios):.0%})' if scope == 'full' else ''} |"
    )


class Awaitable:
    """A part of this process with awaitable methods, for the channel that reaches no other."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            return getattr(self.part, name)(*args)

        return call


async def compare(options: argparse.Namespace) -> None:
    counts = [int(count) for count in options.receivers.split(",")]
    runtime = ProcessRuntime(lambda event: None)
    publisher = await runtime.spawn("publisher", Publisher, options.megabytes, options.share)
    readers = [await runtime.spawn(f"reader-{n}", Reader) for n in range(max(counts))]
    print("| channel | scope | receivers | MB sent | publish, s | sync, s | GB/s | of memcpy (range) |")
    print("|---|---|---|---|---|---|---|---|")
    for scope in options.scopes.split(","):
        for kind in options.channels.split(","):
            if kind == "in_process":
                here = Awaitable(Publisher(None, options.megabytes, options.share)), [Awaitable(Reader(None))]
                print(await measure(*here, kind, scope, options), flush=True)
                continue
            for count in counts:
                print(await measure(publisher, readers[:count], kind, scope, options), flush=True)
    await runtime.close()


# ----------------------------------------------------------------------------------------------------------------- LoRA


LORAS = {
    "off": {},
    "merged, r=16 on all layers": {"kind": "merged"},
    "adapter, r=16 on all layers": {"kind": "adapter"},
    "adapter, r=8 on q and v": {"kind": "adapter", "rank": 8, "target_modules": ("q_proj", "v_proj")},
}


async def lora(model_name: str, rounds: int) -> None:
    from headrace.config import ModelConfig
    from headrace.models.catalog import resolve_model

    folder = str(resolve_model(ModelConfig(path=model_name)))
    print(
        "| training.lora | MB sent | publish, s | prepare, s | commit, s | trainer, MB | engine, MB | tokens a CPU second, 16 side by side |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, table in LORAS.items():
        print(f"| {name} {await lora_row(folder, table, rounds)}", flush=True)


async def lora_row(folder: str, table: dict[str, Any], rounds: int) -> str:
    import numpy as np
    import psutil

    from headrace.protocols import Resources
    from headrace.rollout.config import EngineConfig
    from headrace.rollout.engines.native.engine import build_native
    from headrace.training.backends.single_device import build_single_device
    from headrace.training.config import LoraConfig, LossConfig, TrainingConfig
    from headrace.training.policy import probe_batch
    from headrace.types import GenerateRequest, RequestKey, SamplingParams

    def requests(round_: int) -> list[GenerateRequest]:
        sampling = SamplingParams(max_tokens=48, min_tokens=48, seed=round_)
        keys = [RequestKey(lease_id=f"{round_}", member=member, attempt=0) for member in range(16)]
        return [
            GenerateRequest(key=k, group_id=k.lease_id, prompt_ids=np.arange(16) % 12, sampling=sampling) for k in keys
        ]

    runtime, channel = ProcessRuntime(lambda event: None), open_channel("shared_memory")
    config = TrainingConfig(lora=LoraConfig(**table), loss=LossConfig(kl_coef=0.01))
    one = Resources(threads=1)
    trainer = await runtime.spawn("trainer", build_single_device, config, folder, "float32", channel, resources=one)
    engine_arguments = (EngineConfig(), folder, "float32", channel, "keep")
    engine = await runtime.spawn("engine-0", build_native, *engine_arguments, resources=one)
    batch = probe_batch(np.tile(np.arange(16) % 12, (4, 1)), shared=4)
    await trainer.forward_backward(await trainer.annotate(batch, ["reference"]))
    await trainer.optimizer_step()
    times: dict[str, list[float]] = {"publish": [], "prepare": [], "commit": [], "decode": []}
    clock, process = time.perf_counter, psutil.Process(engine.pid)
    for version in range(1, rounds + 1 + WARM_UP):
        started = clock()
        ticket = await trainer.publish(version)
        published = clock()
        await engine.prepare(ticket)
        prepared = clock()
        await engine.commit(ticket)
        committed, used = clock(), process.cpu_times()
        await asyncio.gather(*map(engine.generate, requests(version)))
        worked = process.cpu_times()
        for kind, seconds in zip(times, np.diff([started, published, prepared, committed]), strict=False):
            times[kind].append(float(seconds))
        times["decode"].append(worked.user + worked.system - used.user - used.system)  # others may use the machine too
    memory = [psutil.Process(part.pid).memory_info().rss / 1e6 for part in (trainer, engine)]
    await runtime.close()
    publish, prepare, commit, decode = (statistics.median(found[WARM_UP:]) for found in times.values())
    return (
        f"| {ticket.bytes / 1e6:.1f} | {publish:.3f} | {prepare:.3f} | {commit:.4f} | {memory[0]:.0f} | {memory[1]:.0f} "
        f"| {16 * 48 / decode:.0f} |"
    )


# ------------------------------------------------------------------------------------------------------------- sparsity


def sparsity(model_name: str, rate: float, steps: int) -> None:
    """Train and count: the share of bfloat16 values that differ after each step, and what would travel."""
    from transformers import AutoModelForCausalLM

    from headrace.config import ModelConfig
    from headrace.models.catalog import resolve_model
    from headrace.training.config import OptimizerConfig
    from headrace.training.optimizer import FlatAdamW, FlatParameters

    folder = resolve_model(ModelConfig(path=model_name))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    flat = FlatParameters(model)
    optimizer = FlatAdamW(flat, OptimizerConfig(lr=rate), steps)
    generator = torch.Generator().manual_seed(0)
    print(f"{model_name}: {flat.values.numel():,} bfloat16 weights, AdamW at lr {rate:g}, float32 masters")
    print("| step | changed | MB as positions and values | MB whole |")
    print("|---|---|---|---|")
    for step in range(1, steps + 1):
        before = flat.values.clone()
        tokens = torch.randint(0, model.config.vocab_size, (8, 64), generator=generator)
        logits = model(input_ids=tokens[:, :-1]).logits.float()
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        advantages = torch.randn(8, 1, generator=generator)
        (-(advantages * chosen).mean()).backward()
        optimizer.step()
        changed = int((flat.values.view(torch.int16) != before.view(torch.int16)).sum())
        share = changed / before.numel()
        print(f"| {step} | {share:.3%} | {changed * 6 / 1e6:.2f} | {before.numel() * 2 / 1e6:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--channels", default=",".join(AVAILABLE))
    parser.add_argument("--receivers", default="1,3")
    parser.add_argument("--scopes", default=",".join(SCOPES))
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--folder", default=None, help="of the filesystem channel; /dev/shm for memory")
    parser.add_argument("--sparsity", metavar="MODEL", default="")
    parser.add_argument("--lora", metavar="MODEL", default="")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    if options.sparsity:
        sparsity(options.sparsity, options.lr, options.steps)
    elif options.lora:
        asyncio.run(lora(options.lora, options.rounds))
    else:
        asyncio.run(compare(options))


if __name__ == "__main__":
    main()
