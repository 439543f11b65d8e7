"""Moves weights through a folder: each version is a safetensors file, published by a rename, and mapped by its readers.

    weights/
      main/0000000007.safetensors   whole from the moment it has this name
      main/latest.json              the newest ticket; its change is the notification for readers that pull
      lock                          held by the one publisher

A file is never written again, so a reader's views stay valid for ever, pruned file or not.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch

from headrace.errors import PartFailed, StaleTicket
from headrace.exchange.channels.base import Channel
from headrace.exchange.channels.layout import block_sums
from headrace.types import MAIN_POLICY, Scope, WeightTicket


class FilesystemChannel(Channel):
    """Reaches every machine that mounts the folder. `keep`: so many newest versions of a policy are kept."""

    def __init__(self, folder: str, keep: int = 2) -> None:
        super().__init__()
        self._folder, self._keep = Path(folder), keep
        self._lock: int | None = None

    def settings(self) -> dict[str, object]:
        return {"folder": str(self._folder), "keep": self._keep}

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        policy: str = MAIN_POLICY,
        scope: Scope = "full",
    ) -> WeightTicket:
        from safetensors.torch import save_file

        self._lock_folder()
        self._begin(version, policy)
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        path = self._file(policy, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}.new")
        order = json.dumps(list(named), separators=(",", ":"))
        try:
            save_file(named, building, metadata={"version": str(version), "order": order})
            ticket = WeightTicket(
                policy=policy,
                version=version,
                scope=scope,
                locator=f"file://{path.resolve()}",
                checksum=file_checksum(building, version, policy),
                bytes=sum(tensor.numel() * tensor.element_size() for tensor in named.values()),
            )
            building.rename(path)
            _write_atomically(path.with_name("latest.json"), msgspec.json.encode(ticket))
        except OSError as error:
            raise PartFailed(
                f"weights of version {version} cannot be written to {path.parent}: {error.strerror}"
            ) from None
        finally:
            building.unlink(missing_ok=True)
        self._remember(ticket)
        self._prune(policy)
        return ticket

    def latest(self, policy: str | None = None) -> WeightTicket | None:
        """The newest ticket in the folder, whoever published it."""
        path = self._folder / (policy or self._last_policy) / "latest.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=WeightTicket)
        except FileNotFoundError:
            return super().latest(policy)
        except msgspec.MsgspecError as error:
            raise PartFailed(f"{path} is not a ticket: {error}") from None

    def _newest(self, policy: str) -> WeightTicket | None:
        return self.latest(policy)

    def read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        from safetensors import SafetensorError, safe_open

        path = Path(ticket.locator.removeprefix("file://"))
        if not ticket.locator.startswith("file://") or path.suffix != ".safetensors":
            raise PartFailed(f"not a ticket of the filesystem channel: {ticket.locator!r}")
        try:
            if file_checksum(path, ticket.version, ticket.policy) != ticket.checksum:
                raise PartFailed(f"weights of version {ticket.version} do not match their checksum")
            with safe_open(path, framework="pt", device="cpu") as file:
                order = json.loads((file.metadata() or {}).get("order", "null")) or file.keys()
                found = {name: file.get_tensor(name) for name in order}
        except FileNotFoundError:
            raise StaleTicket(f"version {ticket.version} of {ticket.policy!r} is not kept any more") from None
        except (SafetensorError, ValueError) as error:
            raise PartFailed(f"{path} is not a file of weights: {error}") from None
        self._remember(ticket)
        return found

    def release(self, ticket: WeightTicket) -> None:
        """Nothing waits for it: a mapped file lives until its last view is gone."""

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _file(self, policy: str, version: int) -> Path:
        return self._folder / policy / f"{version:010d}.safetensors"

    def _prune(self, policy: str) -> None:
        for old in sorted((self._folder / policy).glob("*.safetensors"))[: -self._keep]:
            old.unlink(missing_ok=True)

    def _lock_folder(self) -> None:
        """One publisher a folder, wherever it runs: the lock goes with its process."""
        if self._lock is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise PartFailed(
                f"another process publishes to {self._folder}; two trainers would overwrite each other's versions"
            ) from None
        self._lock = descriptor


def file_checksum(path: Path, version: int, policy: str) -> str:
    """As `layout.checksum`, over the bytes of a file, its header included."""
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{policy}/{version}/{size}".encode(), digest_size=16)
    if size:
        memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        digest.update(block_sums(memory, version))
        digest.update(memory[: min(size, 1 << 16)].numpy().tobytes())  # the header says what the bytes mean
    return digest.hexdigest()


def _write_atomically(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.replace(path)
