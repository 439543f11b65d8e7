"""The state of a run into folders that a crash cannot half-write, and back.

    checkpoints/step_000010/
      model/          weights as a plain Hugging Face folder, optimiser and schedule beside them
      flow.json       step, version, lease index, data position, counts, leases in flight
      units/N.unit    scored units that waited for the trainer
      manifest.json   sizes and hashes of the small files; written last, then the folder is renamed into place
    version.json      a number above which no engine has seen a version; written before a sync would pass it

A checkpoint commits by a rename. The leases of units that were running return as admitted, with their index, so that a
seeded run samples the same tokens again; those that were ready return as ready; a batch that was trained but not live
yet counts as trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import RunDirError, RunError, UnitLost
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.codec import decode_task, decode_unit, encode
from headrace.exchange.staleness import VersionLine
from headrace.protocols import Lease
from headrace.training.checkpoint_folder import verify_folder
from headrace.types import Group, Task, Unit

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
    """What to write of the flow, and the units in the order of `flow["ready"]`, then `flow["kept"]`."""
    kept = buffer.kept()
    ledger = buffer.ledger.state(kept=len(kept))
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
        "ledger": ledger,
        "running": [_lease(lease.index, lease.task) for lease in running] + [_lease(i, task) for i, task in waiting],
        "ready": [_lease(lease.index, lease.task) for lease in ready],
        "kept": [_lease(lease.index, lease.task) for lease in kept],
        # What a recycled task had sampled stays behind: those tokens belong to weights that no engine runs any more.
        "pool": [encode(task).hex() for task, _ in buffer.pool],
    }
    return flow, [buffer.store.read(lease.lease_id) for lease in (*ready, *kept)]


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
    stored, kept = _stored_units(buffer), buffer.store.scan()
    units = [_unit(restored.folder, number) for number in range(len(flow["ready"]) + len(flow.get("kept", ())))]
    for entry, unit in zip(flow.get("kept", ()), units[len(flow["ready"]) :], strict=True):  # older than what is ready
        buffer.keep(_new_lease(buffer, int(entry["index"]), _task(entry)), unit)
    for entry, unit in zip(flow["ready"], units, strict=False):
        _adopt(buffer, int(entry["index"]), _task(entry), unit)
    for entry in sorted(flow["running"], key=_index):
        _go_on(buffer, int(entry["index"]), _task(entry), stored)
    _adopt_later_ones(buffer, {index: key for index, key in stored.items() if index >= buffer.next_index})
    for key in kept:  # what is left was trained or dropped before the checkpoint
        buffer.store.acknowledge(key)


def _stored_units(buffer: LeaseBuffer) -> dict[int, str]:
    """Lease index -> key of what a durable store holds of earlier incarnations, the latest of each."""
    found: dict[int, tuple[int, str]] = {}
    for key in buffer.store.scan():
        incarnation, _, index = key.partition("-")
        if incarnation.isdigit() and index.isdigit():
            found[int(index)] = max(found.get(int(index), (-1, "")), (int(incarnation), key))
    return {index: key for index, (_, key) in sorted(found.items())}


def _unit(folder: Path, number: int) -> Unit:
    return decode_unit((folder / "units" / f"{number}.unit").read_bytes())


def _new_lease(buffer: LeaseBuffer, index: int, task: Task) -> Lease:
    lease = Lease(lease_id=f"{buffer.incarnation}-{index}", index=index, task=task)
    buffer.ledger.admit(lease)
    return lease


def _adopt(buffer: LeaseBuffer, index: int, task: Task, unit: Unit) -> None:
    buffer.put(_new_lease(buffer, index, task), unit)


def _go_on(buffer: LeaseBuffer, index: int, task: Task, stored: dict[int, str]) -> None:
    """The lease becomes ready if its unit was stored after the checkpoint, else it runs again."""
    unit = _read(buffer, stored.get(index))
    if unit is not None:
        _adopt(buffer, index, task, unit)
    else:
        buffer.restored.append((index, task, None))


def _adopt_later_ones(buffer: LeaseBuffer, stored: dict[int, str]) -> None:
    """Units of leases that the checkpoint does not know. The tasks are drawn again as they were then: those whose unit is
    there are skipped, the others keep the numbers that are left, so that their samples repeat."""
    units = {index: unit for index, key in stored.items() if (unit := _read(buffer, key)) is not None}
    if not units:
        return
    first, last = buffer.next_index, max(units)
    numbers = deque(index for index in range(first, last + 1) if index not in units)
    here = {index: unit.task for index, unit in units.items() if isinstance(unit, Group)}
    expected = Counter(task.task_id for task in here.values())
    buffer.next_index = last + 1
    for index in range(first, last + 1):
        task = buffer.next_task()
        if task is None:
            break
        if expected[task.task_id] > 0:
            expected[task.task_id] -= 1
        elif index in units and index not in here:  # a trajectory does not say which task it is of
            here[index] = task
        elif numbers:
            buffer.restored.append((numbers.popleft(), task, None))
        else:  # tasks were recycled meanwhile, so that the order is another
            buffer.pool.append((task, None))
    for index, unit in units.items():
        if index in here:
            _adopt(buffer, index, here[index], unit)


def _read(buffer: LeaseBuffer, key: str | None) -> Unit | None:
    try:
        return buffer.store.read(key) if key is not None else None
    except UnitLost:
        return None


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
