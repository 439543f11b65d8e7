"""Turns the keys and values of a sequence that stops for now into a handle, and the handle back into them, once.

They lie in this process's memory, or as safetensors files in a folder from which any engine of the same model may take
them up. Room is bounded: the oldest go first, and a handle that is gone costs a recomputation, nothing else.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

LayerKeys = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> keys and values, each [L, kv_heads, head_dim]."""

_ON_DISK = re.compile(r"disk:([0-9a-f]{32})")


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
    """What one engine has saved. `model` names the model and the type of its numbers: nothing else may be taken up."""

    def __init__(self, name: str, model: str, limit_bytes: int, folder: str = "") -> None:
        self.name, self.model, self.limit, self.folder = name, model, limit_bytes, Path(folder) if folder else None
        self.bytes = 0
        self._kept: OrderedDict[str, tuple[int, Saved | None]] = OrderedDict()
        self._count = 0

    def put(self, saved: Saved) -> str | None:
        """A handle; None when there is no room for it even alone."""
        size = saved.nbytes
        if size > self.limit:
            return None
        while self.bytes + size > self.limit:
            self.drop(next(iter(self._kept)))
        if self.folder is None:
            self._count += 1
            handle = f"{self.name}:{self._count}"
        else:
            handle = self._write(saved, self.folder)
        self._kept[handle] = (size, saved if self.folder is None else None)
        self.bytes += size
        return handle

    def take(self, handle: str | None) -> Saved | None:
        """What was saved, which is then gone; None for a handle that names nothing (any more)."""
        if handle is None:
            return None
        _, saved = self._forget(handle)
        name = _ON_DISK.fullmatch(handle)
        if saved is None and name is not None and self.folder is not None:
            path = self.folder / f"{name[1]}.safetensors"
            saved = self._read(path)
            path.unlink(missing_ok=True)
        return saved

    def drop(self, handle: str) -> None:
        self._forget(handle)
        if self.folder is not None and (name := _ON_DISK.fullmatch(handle)):
            (self.folder / f"{name[1]}.safetensors").unlink(missing_ok=True)

    def clear(self) -> None:
        for handle in list(self._kept):
            self.drop(handle)

    def _forget(self, handle: str) -> tuple[int, Saved | None]:
        size, saved = self._kept.pop(handle, (0, None))
        self.bytes -= size
        return size, saved

    # ------------------------------------------------------------------------------------------------------ on disk

    def _write(self, saved: Saved, folder: Path) -> str:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        name = secrets.token_hex(16)
        tensors = {"ids": torch.tensor(saved.ids)}
        for layer, (keys, values) in saved.layers.items():
            tensors |= {f"{layer}.keys": keys.contiguous(), f"{layer}.values": values.contiguous()}
        facts = json.dumps({"model": self.model, "version": saved.version, "pure": saved.pure})
        # Renamed last: who finds the name finds the whole.
        partial = folder / f".{name}.part"
        save_file(tensors, partial, metadata={"saved": facts})
        partial.rename(folder / f"{name}.safetensors")
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
