"""Turns named tensors into one flat run of bytes with a manifest, and that run back into tensor views."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.errors import PartFailed

TENSOR_ALIGN_BYTES = 64
BLOCK_BYTES = 1024
SAMPLE_EVERY = 256
SAMPLE_ABOVE_BYTES = 16 << 20
CAPACITY_ALIGN_BYTES = BLOCK_BYTES * SAMPLE_EVERY


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor stands: (name, dtype, shape, offset) in the order published; `bytes` without the last padding."""

    entries: tuple[tuple[str, str, tuple[int, ...], int], ...]
    bytes: int

    @property
    def capacity(self) -> int:
        return max(1, -(-self.bytes // CAPACITY_ALIGN_BYTES)) * CAPACITY_ALIGN_BYTES

    def manifest(self) -> bytes:
        return json.dumps([self.bytes, *self.entries], separators=(",", ":")).encode()


def plan(tensors: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    """Tensors one after another, each on a 64-byte border (every dtype may be viewed there)."""
    entries, end = [], 0
    for name, tensor in tensors:
        offset = -(-end // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES
        entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        end = offset + tensor.numel() * tensor.element_size()
    return Layout(tuple(entries), end)


def parse_manifest(manifest: bytes) -> Layout:
    """Raises `PartFailed` for bytes that are no manifest: they may come from a stranger, and say where memory is written."""
    try:
        size, *rows = json.loads(manifest)
        if type(size) is not int or size < 0:
            raise ValueError(f"{size} bytes")
        entries = tuple((str(name), dtype, tuple(shape), offset) for name, dtype, shape, offset in rows)
        for name, dtype, shape, offset in entries:
            if not isinstance(getattr(torch, dtype), torch.dtype):
                raise ValueError(f"{name} is of type {dtype}")
            if any(type(number) is not int or number < 0 for number in (*shape, offset)):
                raise ValueError(f"{name} has shape {shape} at {offset}")
            end = offset + math.prod(shape) * getattr(torch, dtype).itemsize
            if end > size or offset % TENSOR_ALIGN_BYTES:
                raise ValueError(f"{name} ends at {end} of {size} bytes")
    except (ValueError, TypeError, AttributeError) as error:
        raise PartFailed(f"not a manifest of weights: {error}") from None
    return Layout(entries, size)


def views(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Tensors over memory [capacity] uint8, without a copy."""
    found = {}
    for name, dtype_name, shape, offset in layout.entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            found[name] = torch.empty(shape, dtype=dtype)
        else:
            found[name] = memory[offset : offset + size].view(dtype).view(shape)
    return found


def fill(memory: torch.Tensor, layout: Layout, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Copy the tensors to their places in memory [capacity] uint8.

    Neighbours in one storage that are neighbours at their places too (parameters that are views of one flat tensor) go in
    one copy: the C library's copy of some hundred MB runs at the speed of memory, one of each tensor at 0.8 of it.
    """
    targets = views(memory, layout)
    run: _Run | None = None
    for name, tensor in tensors:
        source, target = tensor.detach(), targets[name]
        size = source.numel() * source.element_size()
        if size == 0:
            continue
        if source.device.type != "cpu" or not source.is_contiguous() or source.is_conj() or source.is_neg():
            target.copy_(source)
            continue
        storage, place, start = source.untyped_storage().data_ptr(), target.data_ptr(), source.data_ptr()
        if run is not None and run.storage == storage and start - run.source == place - run.target >= run.bytes:
            run.bytes = start - run.source + size
            continue
        if run is not None:
            run.copy()
        run = _Run(storage, place, start, size)
    if run is not None:
        run.copy()


@dataclass(slots=True)
class _Run:
    """Addresses and length of bytes that stand together in one storage and shall do so in the layout."""

    storage: int
    target: int
    source: int
    bytes: int

    def copy(self) -> None:
        # It can stream past the caches, which torch's own loop cannot.
        ctypes.memmove(self.target, self.source, self.bytes)


def checksum(memory: torch.Tensor, layout: Layout, version: int, policy: str) -> str:
    """Hash of whose version this is, manifest and bytes: all bytes up to 16 MiB; above, one 1 KiB block in 256, others with each version.

    A full pass costs as much as the copy itself, at both ends. What the sample finds: bytes of another version, a
    tensor at the wrong place, a truncated or unwritten stretch of 256 KiB or more. A single flipped byte outside the
    sampled blocks (255 in 256) passes. Blocks are hashed in order; within a block, words are summed modulo 2^64.
    """
    size = layout.capacity if layout.bytes > SAMPLE_ABOVE_BYTES else layout.bytes
    digest = hashlib.blake2b(block_sums(memory[:size], version), digest_size=16)
    digest.update(f"{policy}/{version}".encode() + layout.manifest())
    return digest.hexdigest()


def block_sums(memory: torch.Tensor, version: int) -> bytes:
    """Sums of the blocks of memory [any] uint8, sampled when it is large; what is left of the last block as it is."""
    whole = memory.numel() // BLOCK_BYTES * BLOCK_BYTES
    blocks = memory[:whole].view(torch.int64).view(-1, BLOCK_BYTES // 8)
    if memory.numel() > SAMPLE_ABOVE_BYTES:
        blocks = blocks[version % SAMPLE_EVERY :: SAMPLE_EVERY]
    return blocks.sum(dim=1).numpy().tobytes() + memory[whole:].numpy().tobytes()
