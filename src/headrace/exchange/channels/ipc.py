"""Moves weights through memory that torch shares between processes of one machine; on a GPU, through device memory.

    shared storage: [capacity] data, [64] header (token, version), [rest] manifest

The publisher fills the older of two storages while receivers copy from the newer one. A receiver holds nothing: it copies
to memory of its own and looks at the version before and after, so a dead or stopped one blocks nobody, and one that was
too slow is refused, not torn. On CUDA the same code copies from device to device; that path is untested.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Callable
from typing import Any

import torch

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels.base import CopyingChannel, Slot
from headrace.exchange.channels.layout import Layout, parse_manifest
from headrace.types import NO_VERSION, WeightTicket

_HEADER_BYTES = 64
_KEPT = 4
"""Storages that a receiver keeps open: those of two policies."""


class IpcChannel(CopyingChannel):
    """`device` "cpu" or "cuda:N" is where the publisher keeps its two versions."""

    one_machine = True

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        super().__init__()
        self._storages: dict[int, _Shared] = {}  # publisher: by the address of a slot's memory
        self._open: dict[str, torch.Tensor] = {}  # receiver: by handle

    def settings(self) -> dict[str, object]:
        return {"device": self._device}

    def close(self) -> None:
        super().close()
        for shared in self._storages.values():
            shared.close()
        self._storages.clear()
        self._open.clear()

    def _allocate(self, size: int) -> torch.Tensor:
        # The manifest's size is not known yet: names and shapes of a model take well under a hundredth of its weights.
        shared = _Shared(size, size // 8 + (1 << 16), self._device)
        memory = shared.whole[:size]
        self._storages[memory.data_ptr()] = shared
        return memory

    def _withdraw(self, slot: Slot) -> None:
        shared = self._storages[slot.memory.data_ptr()]
        shared.write(NO_VERSION, b"")
        needed = {slot.memory.data_ptr(), *self._published.addresses()}
        for address in [address for address in self._storages if address not in needed]:  # of slots that were replaced
            self._storages.pop(address).close()

    def _offer(self, slot: Slot, policy: str, version: int) -> str:
        shared = self._storages[slot.memory.data_ptr()]
        shared.write(version, slot.layout.manifest())
        return f"ipc:{shared.handle}"

    def _receive(self, ticket: WeightTicket, room: Callable[[Layout], Slot]) -> Slot:
        kind, _, handle = ticket.locator.partition(":")
        if kind != "ipc":
            raise PartFailed(f"not a ticket of the ipc channel: {ticket.locator!r}")
        whole = self._attach(handle, ticket)
        layout = parse_manifest(_read(whole, handle, ticket))
        slot = room(layout)
        slot.memory[: layout.bytes].copy_(whole[: layout.bytes])
        _read(whole, handle, ticket)
        return slot

    def _attach(self, handle: str, ticket: WeightTicket) -> torch.Tensor:
        if handle not in self._open:
            while len(self._open) >= _KEPT:
                del self._open[next(iter(self._open))]
            self._open[handle] = _attach(handle, ticket)
        return self._open[handle]


class _Shared:
    """The publisher's side of one storage: [capacity] data, header, manifest."""

    def __init__(self, capacity: int, manifest_room: int, device: str) -> None:
        self.whole = torch.zeros(capacity + _HEADER_BYTES + manifest_room, dtype=torch.uint8, device=device)
        self._capacity = capacity
        self._token = secrets.token_bytes(16)
        self._file: int | None = None
        words: dict[str, Any] = {"capacity": capacity, "token": self._token.hex()}
        if self.whole.is_cuda:
            shared = self.whole.untyped_storage()._share_cuda_()
            words["cuda"] = [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in shared]
        else:
            descriptor, size = self.whole.untyped_storage()._share_fd_cpu_()
            self._file = os.dup(descriptor)
            words |= {"pid": os.getpid(), "fd": self._file, "bytes": size}
        self.handle = json.dumps(words, separators=(",", ":"))

    def write(self, version: int, manifest: bytes) -> None:
        """The manifest first, then the version that makes it valid."""
        if len(manifest) > self.whole.numel() - self._capacity - _HEADER_BYTES:
            raise PartFailed(
                f"the names and shapes of these weights take {len(manifest)} bytes, more than the channel keeps"
            )
        start = self._capacity + _HEADER_BYTES
        if manifest:
            self.whole[start : start + len(manifest)].copy_(_tensor(manifest))
        words = self._token + version.to_bytes(8, "little", signed=True) + len(manifest).to_bytes(8, "little")
        self.whole[self._capacity : self._capacity + len(words)].copy_(_tensor(words))
        if self.whole.is_cuda:
            torch.cuda.synchronize(self.whole.device)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _attach(handle: str, ticket: WeightTicket) -> torch.Tensor:
    """The whole storage that a handle names."""
    try:
        words = json.loads(handle)
        if "cuda" in words:
            parts = [base64.b64decode(x) if isinstance(x, str) else x for x in words["cuda"]]
            storage = torch.UntypedStorage._new_shared_cuda(*parts)
            return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
        pid, descriptor, size = int(words["pid"]), int(words["fd"]), int(words["bytes"])
        path = f"/proc/{pid}/fd/{descriptor}"
        if os.stat(path).st_size < size:
            raise FileNotFoundError(path)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except OSError:
        raise StaleTicket(
            f"version {ticket.version} of {ticket.policy!r} is gone: its publisher has replaced it, closed or died"
        ) from None
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise PartFailed(f"not a handle of the ipc channel: {error}") from None


def _read(whole: torch.Tensor, handle: str, ticket: WeightTicket) -> bytes:
    """The manifest, if the storage holds the ticket's version now."""
    words = json.loads(handle)
    capacity = int(words["capacity"])
    header = bytes(whole[capacity : capacity + 32].cpu().numpy())
    version, size = int.from_bytes(header[16:24], "little", signed=True), int.from_bytes(header[24:32], "little")
    if header[:16].hex() != words["token"] or version != ticket.version:
        raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is not kept any more")
    start = capacity + _HEADER_BYTES
    return bytes(whole[start : start + size].cpu().numpy())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
