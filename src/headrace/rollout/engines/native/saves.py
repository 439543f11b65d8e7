"""Turns the keys and values of a sequence that stops for now into a handle, and the handle back into them, once.

They lie in this process's memory, or as safetensors files in a folder from which any engine of the same model may take
them up. Room is bounded: the oldest go first, and a handle that is gone costs a recomputation, nothing else.
"""

from __future__ import annotations

import fcntl
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.errors import ModelError

LayerKeys = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> keys and values, each [L, kv_heads, head_dim]."""

_ON_DISK = re.compile(r"disk:([0-9a-f]{32})")
"""The first half names the engine that wrote it, the second what it is."""
_LEFT_FOR_S = 3600.0
"""What a dead engine left is worth keeping for so long: a generation that is to go on goes on soon."""


@dataclass(frozen=True, slots=True)
class Saved:
    """ids: [L] tokens that the keys and values belong to, all but the sequence's last

    version: that was live when they were saved; pure: it made all of them
    """

    ids: list[int]
    version: int
    pure: bool
    layers: LayerKeys

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pair in self.layers.values() for part in pair)


class Saves:
    """What one engine has saved. `model` names the model and the type of its numbers: nothing else may be taken up.

    In a folder an engine holds a lock on its own name while it lives. Whoever starts there takes over what the dead have
    left, as the oldest of what it keeps itself, or deletes it when it is too old.
    """

    def __init__(self, name: str, model: str, limit_bytes: int, folder: str = "") -> None:
        self.name, self.model, self.limit, self.folder = name, model, limit_bytes, Path(folder) if folder else None
        self.bytes = 0
        self.failed = 0
        """Writes that failed: the disk is full, or the folder gone."""
        self._kept: OrderedDict[str, tuple[int, Saved | None]] = OrderedDict()
        self._owner = secrets.token_hex(8)
        if self.folder is not None:
            self._settle(self.folder)

    def put(self, saved: Saved) -> str | None:
        """A handle; None when there is no room for it even alone, or it cannot be written."""
        size = saved.nbytes
        if size > self.limit:
            return None
        self._shrink_to(self.limit - size)
        if self.folder is None:
            handle = f"{self.name}:{secrets.token_hex(8)}"
        else:
            written = self._write(saved, self.folder)
            if written is None:
                self.failed += 1
                return None
            handle = written
        self._kept[handle] = (size, saved if self.folder is None else None)
        self.bytes += size
        return handle

    def take(self, handle: str | None, ids: list[int]) -> Saved | None:
        """What was saved of these tokens, which is then gone; None for a handle that names nothing (any more), or other
        tokens: those stay for whom they are meant."""
        if handle is None:
            return None
        _, saved = self._kept.get(handle, (0, None))
        if saved is None and (path := self._path(handle)):
            saved = self._read(path)
        if saved is None or saved.ids != ids:
            return None
        self.drop(handle)
        return saved

    def drop(self, handle: str) -> None:
        size, _ = self._kept.pop(handle, (0, None))
        self.bytes -= size
        if path := self._path(handle):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        for handle in list(self._kept):
            self.drop(handle)

    def _shrink_to(self, limit: int) -> None:
        while self._kept and self.bytes > limit:
            self.drop(next(iter(self._kept)))

    # ------------------------------------------------------------------------------------------------------ on disk

    def _path(self, handle: str) -> Path | None:
        name = _ON_DISK.fullmatch(handle)
        return self.folder / f"{name[1]}.safetensors" if self.folder is not None and name else None

    def _settle(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._alive = self._mark(folder)
            self._take_over(folder)
        except OSError as problem:
            raise ModelError(f"rollout.engine.kv_folder: {folder} cannot be used: {problem.strerror}") from problem

    def _mark(self, folder: Path) -> Any:
        """The open file whose lock says that this engine lives. It gets its name once it is locked."""
        made = folder / f".{self._owner}.new"
        alive = made.open("w")
        fcntl.flock(alive, fcntl.LOCK_EX)
        made.rename(folder / f".{self._owner}.lock")
        return alive

    def _take_over(self, folder: Path) -> None:
        for owner in self._dead(folder):
            found = [(path.stat(), path) for path in folder.glob(f"{owner}*.safetensors")]
            for facts, path in sorted(found, key=lambda one: one[0].st_mtime):
                if time.time() - facts.st_mtime > _LEFT_FOR_S:
                    path.unlink(missing_ok=True)
                else:
                    self._kept[f"disk:{path.stem}"] = (facts.st_size, None)
                    self.bytes += facts.st_size
            for path in folder.glob(f".{owner}*.part"):
                path.unlink(missing_ok=True)
        self._shrink_to(self.limit)

    def _dead(self, folder: Path) -> Iterator[str]:
        """Names of engines that left a mark and hold no lock on it; the mark goes once they are dealt with."""
        for mark in folder.glob(".*.lock"):
            try:
                other = mark.open()
            except FileNotFoundError:
                continue  # another starter dealt with it
            with other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield mark.name[1:].removesuffix(".lock")
                mark.unlink(missing_ok=True)

    def _write(self, saved: Saved, folder: Path) -> str | None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        name = self._owner + secrets.token_hex(8)
        tensors = {"ids": torch.tensor(saved.ids)}
        for layer, (keys, values) in saved.layers.items():
            tensors |= {f"{layer}.keys": keys.contiguous(), f"{layer}.values": values.contiguous()}
        facts = json.dumps({"model": self.model, "version": saved.version, "pure": saved.pure})
        # Renamed last: who finds the name finds the whole.
        partial = folder / f".{name}.part"
        try:
            save_file(tensors, partial, metadata={"saved": facts})
            partial.rename(folder / f"{name}.safetensors")
        except (OSError, SafetensorError):
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return None
        return f"disk:{name}"

    def _read(self, path: Path) -> Saved | None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["saved"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            if facts["model"] != self.model:
                return None
            ids = tensors.pop("ids").tolist()
            names = [name.removesuffix(".keys") for name in tensors if name.endswith(".keys")]
            layers = {int(name): (tensors[f"{name}.keys"], tensors[f"{name}.values"]) for name in names}
            return Saved(ids, facts["version"], facts["pure"], layers)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None  # gone, or not whole: the prefix is computed again
