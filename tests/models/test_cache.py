"""The cache of built models: whole or not at all, one builder at a time, and every byte checked at each use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from headrace.errors import ModelError
from headrace.models.cache import MANIFEST, cache_root, cached_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def build(folder) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)


def never(folder) -> None:
    raise AssertionError("built twice")


def test_it_is_built_once(tmp_path) -> None:
    folder = cached_folder("m", build)
    assert folder == cache_root() / "m" == tmp_path / "headrace" / "models" / "m"
    assert cached_folder("m", never) == folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("place", [0, -1])
def test_one_flipped_bit_is_named_with_the_remedy(name, place) -> None:
    path = cached_folder("m", build) / name
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=rf"{name}.*damaged.*rm -r") as caught:
        cached_folder("m", never)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST])
def test_a_file_that_is_gone_is_named(name) -> None:
    (cached_folder("m", build) / name).unlink()
    with pytest.raises(ModelError, match=rf"{name}.*missing.*rm -r"):
        cached_folder("m", never)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": 3}', '{"sha256": {}}', '{"sha256": {"config.json": 1}}'])
def test_a_damaged_manifest_is_no_pass(text) -> None:
    (cached_folder("m", build) / MANIFEST).write_text(text)
    with pytest.raises(ModelError, match="rm -r"):
        cached_folder("m", never)


def test_a_build_that_fails_leaves_nothing() -> None:
    def fail(folder) -> None:
        build(folder)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached_folder("m", fail)
    assert [path.name for path in cache_root().iterdir()] == ["m.lock"]
    assert cached_folder("m", build).is_dir()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        cached_folder("m", build)


def _slow_build(folder, log) -> None:
    log.put(os.getpid())
    time.sleep(0.3)
    build(folder)


def _ask(log, answers) -> None:
    answers.put(str(cached_folder("m", lambda folder: _slow_build(folder, log))))


def _hang(log) -> None:
    def stuck(folder) -> None:
        build(folder)
        log.put(os.getpid())
        time.sleep(60)

    cached_folder("m", stuck)


def test_processes_that_ask_at_once_build_once() -> None:
    context = multiprocessing.get_context("fork")
    log, answers = context.Queue(), context.Queue()
    askers = [context.Process(target=_ask, args=(log, answers)) for _ in range(3)]
    for process in askers:
        process.start()
    assert {answers.get(timeout=20) for _ in askers} == {str(cache_root() / "m")}
    for process in askers:
        process.join(20)
    log.get(timeout=5)
    assert log.empty()


def test_a_builder_that_is_killed_blocks_nobody_and_leaves_nothing() -> None:
    context = multiprocessing.get_context("fork")
    log = context.Queue()
    process = context.Process(target=_hang, args=(log,))
    process.start()
    os.kill(log.get(timeout=20), signal.SIGKILL)
    process.join(20)
    assert list(cache_root().glob("m.partial-*")) and not (cache_root() / "m").exists()
    assert cached_folder("m", build).is_dir()
    assert not list(cache_root().glob("m.partial-*"))
