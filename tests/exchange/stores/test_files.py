"""The file store on bad days: kills, torn and damaged records, a full disk, a second writer; and what it leaves behind."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exchange.units import group
from headrace.errors import RunDirError, UnitLost
from headrace.exchange.stores import files as medium
from headrace.exchange.stores.files import FileStore

WRITER = """
import sys
sys.path[:0] = {path!r}
from exchange.units import group
from headrace.exchange.stores.files import FileStore
store = FileStore({folder!r}, segment_bytes=20_000)
for number in range(100_000):
    store.append(f"0-{{number}}", group(str(number), tokens=number % 97 + 1))
    print(number, flush=True)
    if number % 3 == 2:
        store.acknowledge(f"0-{{number - 1}}")
        store.forget([f"0-{{number - 1}}"])
"""


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def test_a_writer_killed_at_any_moment_loses_nothing_that_it_had_put(tmp_path):
    code = WRITER.format(path=[str(Path(__file__).parents[2])], folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(60)]
    time.sleep(random.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    told += [int(line) for line in process.stdout.read().split()]
    process.wait()
    store = FileStore(str(tmp_path))
    found = {int(key.partition("-")[2]) for key in store.scan()}
    kept = {number for number in told if number % 3 != 1 or number == told[-1]}
    assert kept <= found and store.damaged == 0
    for number in sorted(kept):
        sample = store.read(f"0-{number}").episodes[0].samples[0]
        assert sample.sample_id == f"{number}/0" and sample.token_ids.size == number % 97 + 1
    store.close()


@pytest.mark.parametrize("cut", [1, 7, 30, 200])
def test_a_torn_last_record_is_left_out_and_never_written_to(tmp_path, cut):
    store = FileStore(str(tmp_path))
    for name in "abc":
        store.append(name, group(name))
    store.close()
    torn = segments(tmp_path)[0]
    torn.write_bytes(torn.read_bytes()[:-cut])
    store = FileStore(str(tmp_path))
    assert store.scan() == ["a", "b"] and store.damaged == 0
    store.append("d", group("d"))
    store.close()
    store = FileStore(str(tmp_path))
    assert store.scan() == ["a", "b", "d"] and store.read("d").group_id == "d"
    store.close()


@pytest.mark.parametrize("where", ["magic", "length", "data"])
def test_a_damaged_record_costs_itself_alone(tmp_path, where):
    store = FileStore(str(tmp_path))
    for name in "abc":
        store.append(name, group(name))
    place = store._places["b"]
    store.close()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[place.offset + {"magic": 0, "length": 13, "data": 100}[where]] ^= 1
    path.write_bytes(data)
    store = FileStore(str(tmp_path))
    assert store.scan() == ["a", "c"] and store.damaged == 1
    assert store.read("c").group_id == "c"
    store.close()


@pytest.mark.parametrize("noise", [b"\0" * 5000, bytes(range(256)) * 20, b"x"])
def test_a_segment_that_is_no_segment_is_counted_and_passed_over(tmp_path, noise):
    store = FileStore(str(tmp_path))
    store.append("a", group("a"))
    store.close()
    segments(tmp_path)[0].write_bytes(noise)
    store = FileStore(str(tmp_path))
    assert store.scan() == [] and store.damaged == 1
    store.append("b", group("b"))
    assert store.read("b").group_id == "b"
    store.close()


def test_a_folder_in_the_place_of_a_segment_is_left_alone_and_one_in_that_of_the_lock_is_named(tmp_path):
    (tmp_path / "0000000007.log").mkdir()
    store = FileStore(str(tmp_path))
    store.append("a", group("a"))
    store.close()
    store = FileStore(str(tmp_path))
    assert store.scan() == ["a"] and segments(tmp_path)[-1].stem == "0000000009"
    store.close()
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    with pytest.raises(RunDirError, match="lock cannot be opened"):
        FileStore(str(tmp_path))


def test_bytes_that_change_while_the_store_is_open_are_not_handed_out(tmp_path):
    store = FileStore(str(tmp_path))
    store.append("a", group("a"))
    with segments(tmp_path)[-1].open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(UnitLost, match="unit a"):
        store.read("a")
    store.close()


def test_a_second_writer_is_refused(tmp_path):
    store = FileStore(str(tmp_path))
    with pytest.raises(RunDirError, match="in use by another run"):
        FileStore(str(tmp_path))
    store.close()
    FileStore(str(tmp_path)).close()


def test_segments_go_once_nothing_in_them_is_needed(tmp_path):
    store = FileStore(str(tmp_path), segment_bytes=5_000)
    for number in range(100):
        store.append(str(number), group(str(number)))
        if number >= 4:
            store.acknowledge(str(number - 4))
        store.forget(store.acknowledged())
    assert len(segments(tmp_path)) < 6 and int(segments(tmp_path)[-1].stem) > 5, "many were begun, few are left"
    assert [store.read(key).group_id for key in store.scan()] == ["96", "97", "98", "99"]
    store.close()
    store = FileStore(str(tmp_path), segment_bytes=5_000)
    assert store.scan() == ["96", "97", "98", "99"]
    store.close()


def test_a_full_disk_fails_one_append_and_leaves_no_half_record(tmp_path, monkeypatch):
    store = FileStore(str(tmp_path))
    store.append("a", group("a"))
    real = os.writev

    def full(descriptor, parts):
        os.write(descriptor, parts[0])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(medium.os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        store.append("b", group("b"))
    monkeypatch.setattr(medium.os, "writev", real)
    store.append("c", group("c"))
    assert store.scan() == ["a", "c"] and store.read("c").group_id == "c"
    store.close()
    store = FileStore(str(tmp_path))
    assert store.scan() == ["a", "c"] and store.damaged == 0
    store.close()


def test_a_disk_that_cannot_flush_is_said_at_the_next_append(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(medium.os, "fdatasync", broken)
    store = FileStore(str(tmp_path))
    store.append("a", group("a"))
    store._flusher.wait()
    with pytest.raises(OSError, match="Input/output"):
        store.append("b", group("b"))
    store.close()
