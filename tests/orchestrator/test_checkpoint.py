"""Checkpoints: whole or not there, and a flow that comes back as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from exchange.units import buffer, group
from headrace.errors import PartFailed, RunDirError, RunError
from headrace.exchange.ledger import RECYCLED, TRAINED
from headrace.orchestrator.checkpoint import Checkpoints, capture, restore
from headrace.orchestrator.narrator import Narrator
from headrace.training.checkpoint_folder import write_folder
from headrace.types import NO_VERSION


async def save_model(folder: Path) -> None:
    write_folder(str(folder), lambda inside: (inside / "model.safetensors").write_bytes(b"weights" * 100))


async def saved(run: Path, *steps: int, keep: int = 9) -> Checkpoints:
    made = Checkpoints(run, keep)
    for step in steps:
        flow, units = capture(buffer(), step)
        await made.save(step, flow, units, save_model)
    return made


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


async def busy_buffer():
    """At version 2: lease 0 trained, 1 dropped, 2 trained but not live, 3 ready, 4 running, 5 recycled, 6 running."""
    made = buffer(batch=8, ahead=3)
    leases = [await made.admit() for _ in range(7)]
    for number in (0, 2):
        made.put(leases[number], group(str(number), version=1))
    taken = [lease for lease, _ in await made.take(2, 1)]
    made.mark_trained(taken)
    made.settle(leases[0], TRAINED)
    made.settle(leases[1], "timeout")
    made.put(leases[3], group("3", version=1))
    made.settle(leases[5], RECYCLED)
    made.versions.version = 2
    return made, leases


async def test_a_flow_comes_back_with_its_counts_leases_and_data_position(tmp_path):
    before, leases = await busy_buffer()
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.write_version(4)
    flow, units = capture(before, 2)
    await checkpoints.save(2, flow, units, save_model)

    after = buffer(batch=8, ahead=3)
    restored = checkpoints.latest(pytest.fail)
    assert restored.step == 2
    restore(restored, after, after.versions, checkpoints.highest_version(2))
    assert after.versions.version == 5 and after.versions.lag(2) == 0 and after.versions.lag(1) == 1
    ledger = after.ledger
    assert (ledger.trained, dict(ledger.dropped)) == (2, {"timeout": 1, RECYCLED: 1}), "2 was trained: it counts"
    assert [(lease.index, lease.lease_id) for lease in after.ready.values()] == [(3, "1-3")]
    first, second, third, fourth = [await after.admit() for _ in range(4)]
    assert [first.index, second.index] == [4, 6] and first.task == leases[4].task
    assert (third.index, third.task) == (7, leases[5].task), "the recycled task under a new lease"
    assert fourth.index == 8 and fourth.task.task_id == "t8", "then the source's next"
    [(lease, unit)] = await after.take(1, 5)
    assert lease.index == 3 and unit.unit_id == "3" and unit.oldest_version == 1
    ledger.check([lease.lease_id for lease in ledger.in_flight.values()])


@pytest.mark.parametrize("ahead", [0, 1, 3, None])
@pytest.mark.parametrize("oversample", [0, 2])
async def test_room_is_the_same_after_a_restore_as_before(tmp_path, ahead, oversample):
    """The capacity formula, with leases in every state that a checkpoint between two publishes can hold."""

    def made():
        return buffer(batch=3, ahead=ahead, oversample=oversample, max_in_flight=5)

    before = made()
    leases = [await before.admit() for _ in range(3)]
    for number in (0, 1):
        before.put(leases[number], group(str(number)))
    [(taken, _)] = await before.take(1, 0)
    before.mark_trained([taken])
    before.settle(taken, TRAINED)
    held, running = 2, 1
    wanted = 5 - running if ahead is None else min(5 - running, (1 + ahead) * 3 + oversample - held)
    assert before.room() == wanted
    checkpoints = Checkpoints(tmp_path, 2)
    flow, units = capture(before, 1)
    await checkpoints.save(1, flow, units, save_model)
    after = made()
    restore(checkpoints.latest(pytest.fail), after, after.versions, checkpoints.highest_version(1))
    for _ in range(running):  # what was running is admitted anew, before anything else
        await after.admit()
    assert after.room() == wanted and after.held() == held


async def test_only_the_newest_are_kept(tmp_path):
    await saved(tmp_path, 1, 2, 3, 12, keep=2)
    assert names(tmp_path) == ["step_000003", "step_000012"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PartFailed("trainer.save: no space")])
async def test_a_failed_write_leaves_the_ones_before_and_nothing_else(tmp_path, error):
    checkpoints = await saved(tmp_path, 1)

    async def full(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_bytes(b"x")
        raise error

    flow, units = capture(buffer(), 2)
    with pytest.raises(type(error)):
        await checkpoints.save(2, flow, units, full)
    assert names(tmp_path) == ["step_000001"]
    assert checkpoints.latest(pytest.fail).step == 1


async def test_a_failed_rewrite_of_the_same_step_leaves_the_first(tmp_path):
    checkpoints = await saved(tmp_path, 1, keep=1)

    async def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        await checkpoints.save(1, *capture(buffer(), 1), full)
    assert checkpoints.latest(pytest.fail).step == 1
    await checkpoints.save(1, *capture(buffer(), 1), save_model)
    assert names(tmp_path) == ["step_000001"]


async def test_what_a_kill_left_half_done_is_tidied(tmp_path):
    checkpoints = await saved(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    (folder / ".step_000003.new" / "model").mkdir(parents=True)
    (folder / "step_000002").rename(folder / ".step_000002.old")
    assert checkpoints.latest(pytest.fail).step == 2
    assert names(tmp_path) == ["step_000001", "step_000002"]


FILES = ["flow.json", "manifest.json", "model/model.safetensors", "model/manifest.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
async def test_a_damaged_one_is_named_passed_over_and_set_aside(tmp_path, file, damage):
    checkpoints = await saved(tmp_path, 1, 2)
    path = tmp_path / "checkpoints" / "step_000002" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    match damage:
        case "flip":
            path.write_bytes(data)
        case "cut":
            path.write_bytes(data[:-1])
        case "remove":
            path.unlink()
    told: list[str] = []
    assert checkpoints.latest(told.append).step == 1
    assert len(told) == 1 and "step_000002 is passed over" in told[0]
    assert names(tmp_path) == ["damaged_step_000002", "step_000001"]
    assert checkpoints.newest_step() == 1
    await checkpoints.save(2, *capture(buffer(), 2), save_model)
    assert checkpoints.latest(pytest.fail).step == 2


async def test_with_none_that_is_whole_nothing_is_renamed(tmp_path):
    checkpoints = await saved(tmp_path, 1)
    (tmp_path / "checkpoints" / "step_000001" / "manifest.json").write_text("{")
    for _ in range(2):
        with pytest.raises(RunDirError, match="step_000001: its manifest is damaged"):
            checkpoints.latest(lambda text: None)
    with pytest.raises(RunDirError, match="there is none"):
        Checkpoints(tmp_path / "other", 2).latest(pytest.fail)


def test_version_numbers_are_durable_and_a_damaged_one_is_said(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.highest_version(3) == 3
    checkpoints.write_version(7)
    assert json.loads((tmp_path / "version.json").read_text()) == {"highest": 7}
    assert checkpoints.highest_version(3) == 7 and checkpoints.highest_version(9) == 9
    (tmp_path / "version.json").write_text("{}")
    with pytest.raises(RunDirError, match=r"version\.json is damaged"):
        checkpoints.highest_version(3)
    with pytest.raises(RunError, match="cannot be written"):
        Checkpoints(tmp_path / "version.json" / "below", 1).write_version(1)


def test_no_version_is_passed_on_that_the_disk_does_not_cover():
    written = []
    narrator = SimpleNamespace(_written=NO_VERSION, checkpoints=SimpleNamespace(write_version=written.append))
    for version in range(1, 100):
        Narrator.version_written(narrator, version)
        assert written[-1] >= version
    assert len(written) <= 5
