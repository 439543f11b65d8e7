"""Turns command lines into exit codes and single lines, and holds the rules of run folders."""

from __future__ import annotations

import resource
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from headrace import cli
from headrace.config import load_config, resolve
from headrace.errors import ModelError, RunDirError, Stalled, UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """Puts a recorder in the place of `headrace.session`, and gives the calls it got."""
    calls: list[dict] = []

    def run(config, run_dir, *, only=None, resume=False, display=None, samples=None, token="") -> int:
        calls.append(locals() | {"files": sorted(file.name for file in run_dir.iterdir())})
        if run.raises:
            raise run.raises
        return 0

    run.raises = None
    module = types.ModuleType("headrace.session")
    module.run = run
    monkeypatch.setitem(sys.modules, "headrace.session", module)
    return calls


def fail_with(error: Exception) -> None:
    sys.modules["headrace.session"].run.raises = error


def call(monkeypatch, *words: str) -> int:
    """The exit code of one command line."""
    monkeypatch.setattr(sys, "argv", ["headrace", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def one_line(capsys) -> str:
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("headrace: "), captured.err
    return lines[0]


# -------------------------------------------------------------------------------------------------------------- runs


def test_run_makes_a_folder_with_the_resolved_config(here, started, monkeypatch):
    assert call(monkeypatch, "run", "tiny", "training.steps=3", "--display", "none") == 0
    (got,) = started
    assert got["run_dir"] == Path("runs/tiny")
    assert (got["only"], got["resume"], got["display"], got["samples"]) == (None, False, "none", None)
    assert got["config"] == resolve(load_config("tiny", ["training.steps=3"]))
    assert load_config(Path("runs/tiny/config.toml"), []) == got["config"]


def test_name_and_runs_dir_decide_the_folder(here, started, monkeypatch):
    assert call(monkeypatch, "run", "tiny", "--name", "other", "--runs-dir", "elsewhere") == 0
    assert started[0]["run_dir"] == Path("elsewhere/other")
    assert tomllib.loads(Path("elsewhere/other/config.toml").read_text())["name"] == "other"


def test_an_existing_run_is_never_touched(here, started, monkeypatch, capsys):
    call(monkeypatch, "run", "tiny")
    before = Path("runs/tiny/config.toml").read_bytes()
    capsys.readouterr()
    assert call(monkeypatch, "run", "tiny", "training.steps=99") == 2
    assert "runs/tiny exists already; choose another name with --name, or go on with that run" in one_line(capsys)
    assert Path("runs/tiny/config.toml").read_bytes() == before
    assert len(started) == 1


def test_an_empty_folder_may_be_used_and_a_file_may_not(here, started, monkeypatch, capsys):
    Path("runs/tiny").mkdir(parents=True)
    assert call(monkeypatch, "run", "tiny") == 0
    Path("runs/taken").write_text("")
    capsys.readouterr()
    assert call(monkeypatch, "run", "tiny", "--name", "taken") == 2
    assert "runs/taken is a file" in one_line(capsys)
    Path("plain").write_text("")
    assert call(monkeypatch, "run", "tiny", "--runs-dir", "plain") == 2
    assert "lies below a file" in one_line(capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "tiny", "training.step=3"],
        ["run", "tiny", "training.minibatches=7"],
        ["run", "absent.toml"],
        ["run", "tyny"],
        ["run", "tiny", "nonsense"],
        ["run", "tiny", "--name", "a/b"],
        ["run", "tiny", "--name", ".."],
        ["run"],
        ["run", "tiny", "--only", "train"],
        ["run", "tiny", "--samples", "absent"],
        ["run", "tiny", "--only", "train", "--samples", "absent"],
        ["run", "--resume", "absent"],
        ["run", "--resume", "absent", "--name", "x"],
        ["run", "tiny", "--resume", "absent"],
        ["report", "absent"],
        ["check", "tiny", "placement=colocated"],
    ],
)
def test_a_mistake_is_one_line_exit_code_2_and_leaves_nothing_behind(words, here, started, monkeypatch, capsys):
    assert call(monkeypatch, *words) == 2
    one_line(capsys)
    assert list(here.iterdir()) == []
    assert started == []


def test_a_user_error_in_the_run_takes_its_empty_folder_away(here, started, monkeypatch, capsys):
    fail_with(ModelError("model.path: 'x' is no folder"))
    assert call(monkeypatch, "run", "tiny") == 2
    assert one_line(capsys) == "headrace: model.path: 'x' is no folder"
    assert started[0]["files"] == ["config.toml"]
    assert list(Path("runs").iterdir()) == []


def test_a_user_error_after_something_was_written_keeps_the_folder(here, started, monkeypatch):
    def run(config, run_dir, **_):
        (run_dir / "metrics.jsonl").write_text("{}")
        raise UserError("late")

    monkeypatch.setattr(sys.modules["headrace.session"], "run", run)
    assert call(monkeypatch, "run", "tiny") == 2
    assert sorted(file.name for file in Path("runs/tiny").iterdir()) == ["config.toml", "metrics.jsonl"]


def test_a_run_error_is_exit_code_1_and_keeps_its_lines_and_folder(here, started, monkeypatch, capsys):
    fail_with(Stalled("nothing moved\nengine-0: waits"))
    assert call(monkeypatch, "run", "tiny") == 1
    assert capsys.readouterr().err == "headrace: nothing moved\nengine-0: waits\n"
    assert Path("runs/tiny/config.toml").is_file()


def test_a_bug_is_a_traceback(here, started, monkeypatch):
    fail_with(ZeroDivisionError())
    monkeypatch.setattr(sys, "argv", ["headrace", "run", "tiny"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_the_runs_own_exit_code_is_handed_on(here, started, monkeypatch):
    monkeypatch.setattr(sys.modules["headrace.session"], "run", lambda *_, **__: 130)
    assert call(monkeypatch, "run", "tiny") == 130


def test_warnings_go_to_stderr_and_do_not_stop(here, started, monkeypatch, capsys):
    assert call(monkeypatch, "run", "tiny", "group.size=1") == 0
    assert "headrace: warning: group.size" in one_line(capsys)


# ------------------------------------------------------------------------------------------------------------- resume


def test_resume_goes_on_with_the_runs_own_config(here, started, monkeypatch):
    call(monkeypatch, "run", "tiny", "training.steps=3")
    assert call(monkeypatch, "run", "--resume", "runs/tiny") == 0
    assert started[1]["config"] == started[0]["config"]
    assert (started[1]["run_dir"], started[1]["resume"]) == (Path("runs/tiny"), True)


def test_resume_takes_overrides(here, started, monkeypatch):
    call(monkeypatch, "run", "tiny", "training.steps=3")
    assert call(monkeypatch, "run", "--resume", "runs/tiny", "training.steps=9", "seed=2") == 0
    assert (started[1]["config"].training.steps, started[1]["config"].seed) == (9, 2)


def test_resume_of_what_is_no_run(here, started, monkeypatch, capsys):
    Path("empty").mkdir()
    assert call(monkeypatch, "run", "--resume", "empty") == 2
    assert "empty has no config.toml" in one_line(capsys)
    Path("empty/config.toml").write_text("[broken")
    assert call(monkeypatch, "run", "--resume", "empty") == 2
    assert "not valid TOML" in one_line(capsys)


def test_a_user_error_in_a_resumed_run_takes_nothing_away(here, started, monkeypatch):
    call(monkeypatch, "run", "tiny")
    fail_with(RunDirError("no checkpoint"))
    assert call(monkeypatch, "run", "--resume", "runs/tiny") == 2
    assert Path("runs/tiny/config.toml").is_file()


def test_train_only_replays_samples(here, started, monkeypatch, capsys):
    Path("samples").mkdir()
    words = ["run", "tiny", "--only", "train", "--samples", "samples"]
    assert call(monkeypatch, *words) == 2
    for content in (b"", b"\xff" * 2000, b"\x10" * 17):
        Path("samples/a.groups").write_bytes(content)
        assert call(monkeypatch, *words) == 2
        assert "samples holds no whole group" in capsys.readouterr().err
    monkeypatch.setattr("headrace.exchange.codec.read_groups", lambda path: iter([path]))
    assert call(monkeypatch, *words) == 0
    assert (started[0]["only"], started[0]["samples"]) == ("train", Path("samples"))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["my.toml"], "mine"),
        (["my.toml", "name=other"], "other"),
        (["my.toml", "name=other", "--name", "third"], "third"),
        (["tiny"], "serve-"),
        (["tiny", "name=other"], "other"),
    ],
)
def test_a_server_is_named_as_a_run_is(here, started, monkeypatch, words, name):
    Path("my.toml").write_text('name = "mine"\nmodel.path = "tiny"\n')
    assert call(monkeypatch, "serve", *words) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith(name) and (folder.name == name or name == "serve-")


# --------------------------------------------------------------------------------------------------------------- rest


def test_presets_are_listed_with_what_they_are(monkeypatch, capsys):
    assert call(monkeypatch, "presets") == 0
    out = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["quickstart"] and "SmolLM2" in line for line in out)
    (verl,) = [line.split() for line in out if line.split()[:1] == ["verl"]]
    assert verl[1] == "separate" and verl[2] in ("ray", "ray*"), "marked where ray is not installed"
    assert verl[-1] == "fsdp2*", "each axis, and a mark at what is not here"


def test_help_is_quick():
    """Measured in processor time, which a busy machine does not change much; the best of three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [sys.executable, "-m", "headrace.cli", "--help"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert all(command in done.stdout for command in ("run", "check", "report", "presets"))
    assert min(seconds) < 0.5, seconds
