"""The state of a run into folders that a crash cannot half-write, and back.

    checkpoints/step_000010/
      model/          weights as a plain Hugging Face folder, optimiser and schedule beside them
      flow.json       step, version, lease index, data position, counts, leases in flight
      units/N.unit    scored units that waited for the trainer
      manifest.json   sizes and hashes of the small files; written last, then the folder is renamed into place
    version.json      the highest version number that any engine may have seen; written before each sync

A checkpoint commits by a rename. The leases of units that were running return as admitted, with their index, so that a
seeded run samples the same tokens again; those that were ready return as ready; a batch that was trained but not live
yet counts as trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import RunDirError, RunError
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.codec import decode_task, decode_unit, encode
from headrace.exchange.staleness import VersionLine
from headrace.protocols import Lease
from headrace.training.checkpoint_folder import verify_folder
from headrace.types import Unit

MANIFEST = "manifest.json"
PREFIX = "step_"


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was read: where the model lies, and the flow's state."""

    folder: Path
    step: int
    flow: dict[str, Any]

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"


class Checkpoints:
    """All checkpoints of one run folder; the newest `keep` are kept."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.run_folder, self.folder, self.keep = run_folder, run_folder / "checkpoints", keep

    # ----------------------------------------------------------------------------------------------------- writing

    def write_version(self, version: int) -> None:
        """Make the number durable, before an engine sees it: a restored run never gives it to other weights."""
        path = self.run_folder / "version.json"
        try:
            _write_atomically(path, json.dumps({"highest": version}).encode())
        except OSError as error:
            raise RunError(
                f"{path} cannot be written ({error.strerror}); it has to be, before an engine may run version {version}"
            ) from None

    async def save(
        self, step: int, flow: dict[str, Any], units: list[Unit], save_model: Callable[[Path], Awaitable[None]]
    ) -> Path:
        """Write a checkpoint; on any failure (a full disk, say) the earlier ones stay as they are."""
        final = self.folder / f"{PREFIX}{step:06d}"
        building = self.folder / f".{final.name}.new"
        shutil.rmtree(building, ignore_errors=True)
        try:
            building.mkdir(parents=True)
            await save_model(building / "model")
            _write(building / "flow.json", json.dumps(flow).encode())
            for number, unit in enumerate(units):
                _write(building / "units" / f"{number}.unit", encode(unit))
            _write(building / MANIFEST, json.dumps(_hashes(building)).encode())
            replaced = self.folder / f".{final.name}.old"
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():
                final.rename(replaced)
            building.rename(final)
            _sync_folder(self.folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        self._prune()
        return final

    def _prune(self) -> None:
        for folder in self._all()[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(folder for folder in self.folder.glob(f"{PREFIX}*") if folder.is_dir())

    # ----------------------------------------------------------------------------------------------------- reading

    def latest(self, tell: Callable[[str], None]) -> Restored:
        """The newest checkpoint that is whole; a damaged one is named, passed over and renamed, so that it never stands
        among the newest. Raises `RunDirError` for none."""
        self._tidy()
        problems, damaged = [], []
        for folder in reversed(self._all()):
            problem = _damage(folder)
            if problem is None:
                for other in damaged:
                    aside = other.with_name(f"damaged_{other.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    other.rename(aside)
                flow = json.loads((folder / "flow.json").read_bytes())
                return Restored(folder, int(flow["step"]), flow)
            problems.append(f"{folder.name}: {problem}")
            damaged.append(folder)
            tell(f"checkpoint {folder.name} is passed over: {problem}")
        found = "; ".join(problems) or "there is none"
        raise RunDirError(
            f"{self.run_folder}: no checkpoint to go on from ({found}); start the run anew with another --name"
        )

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, unread."""
        return max((int(folder.name.removeprefix(PREFIX)) for folder in self._all()), default=None)

    def _tidy(self) -> None:
        """What a killed writer left: half-written folders go, one that was being replaced comes back."""
        for folder in self.folder.glob(f".{PREFIX}*.new"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self.folder.glob(f".{PREFIX}*.old"):
            final = folder.with_name(folder.name[1:].removesuffix(".old"))
            if final.exists():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.rename(final)

    def highest_version(self, at_least: int) -> int:
        try:
            return max(at_least, int(json.loads((self.run_folder / "version.json").read_bytes())["highest"]))
        except FileNotFoundError:
            return at_least
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirError(f"{self.run_folder}/version.json is damaged ({error}); delete it to go on") from None


# -------------------------------------------------------------------------------------------------- the flow's state


def capture(buffer: LeaseBuffer, step: int) -> tuple[dict[str, Any], list[Unit]]:
    """What to write of the flow, and the ready units in the order of `flow["ready"]`."""
    running = [lease for lease in buffer.ledger.in_flight.values() if lease.state == "admitted"]
    ready = list(buffer.ready.values())
    waiting = [(index, task) for index, task, _ in buffer.restored]
    flow = {
        "step": step,
        "version": buffer.versions.version,
        "restarts": buffer.versions.restarts,
        "incarnation": buffer.incarnation,
        "next_index": buffer.next_index,
        "source": buffer.source.state(),
        "ledger": buffer.ledger.state(),
        "running": [_lease(lease.index, lease.task) for lease in running] + [_lease(i, task) for i, task in waiting],
        "ready": [_lease(lease.index, lease.task) for lease in ready],
        # What a recycled task had sampled stays behind: those tokens belong to weights that no engine runs any more.
        "pool": [encode(task).hex() for task, _ in buffer.pool],
    }
    return flow, [buffer.store.read(lease.lease_id) for lease in ready]


def restore(restored: Restored, buffer: LeaseBuffer, versions: VersionLine, highest_version: int) -> None:
    """Bring a fresh buffer to the state of a checkpoint, in a new incarnation."""
    flow = restored.flow
    versions.version = int(flow["version"])
    versions.restarts = [tuple(pair) for pair in flow["restarts"]]
    versions.restore(highest_version)
    buffer.incarnation = int(flow["incarnation"]) + 1
    buffer.next_index = int(flow["next_index"])
    buffer.source.restore(flow["source"])
    buffer.ledger.restore(flow["ledger"])
    buffer.pool.extend((decode_task(bytes.fromhex(task)), None) for task in flow["pool"])
    buffer.restored.extend((int(entry["index"]), _task(entry), None) for entry in sorted(flow["running"], key=_index))
    for number, entry in enumerate(flow["ready"]):
        unit = decode_unit((restored.folder / "units" / f"{number}.unit").read_bytes())
        lease = Lease(lease_id=f"{buffer.incarnation}-{entry['index']}", index=int(entry["index"]), task=_task(entry))
        buffer.ledger.admit(lease)
        buffer.put(lease, unit)


def _lease(index: int, task: Any) -> dict[str, Any]:
    return {"index": index, "task": encode(task).hex()}


def _task(entry: dict[str, Any]) -> Any:
    return decode_task(bytes.fromhex(entry["task"]))


def _index(entry: dict[str, Any]) -> int:
    return int(entry["index"])


# ------------------------------------------------------------------------------------------------------------- files


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, if anything."""
    try:
        expected = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "it has no manifest"
    except ValueError:
        return "its manifest is damaged"
    found = _hashes(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            return f"{name} is {'missing' if name not in found else 'not what was written'}"
    if (folder / "model" / MANIFEST).is_file():
        try:
            verify_folder(str(folder / "model"))
        except RunDirError as error:
            return str(error)
    return None


def _hashes(folder: Path) -> dict[str, str]:
    """Small files by content; those of the model by size, since its own manifest holds their hashes."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.is_file() and name != MANIFEST:
            if name.startswith("model/"):
                found[name] = f"{file.stat().st_size} bytes"
            else:
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_atomically(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    _write(new, data)
    new.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A rename is durable once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
