"""Starts whole runs for the tests, in this process or in one of their own, and reads what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import cli
from headrace.observability.jsonl import read_jsonl
from headrace.observability.timeline import read_events
from headrace.types import Event

RUN_S = 150.0 * max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1)))
"""No run of these tests takes longer: beyond it, it hangs. A machine that others keep busy is given more."""

CONFIG = """
name = "r"
placement = "sync"
model.path = {model!r}
tasks = {{ source = "sums", options = {{ style = "plain" }} }}
reward.functions = [{{ use = {reward!r} }}]
rollout = {{ sampling.max_tokens = 6, engine.max_running = 64 }}
group.size = 4
training = {{ groups = 4, steps = 6, optimizer.lr = 1e-3 }}
limits = {{ stall_warning_s = 20.0, stall_stop_s = 90.0 }}
observability = {{ sinks = ["jsonl"], display = "lines", samples_every = 0 }}
"""

REWARDS = '''
"""Reward functions of the tests; some misbehave."""

import pathlib
import time


def varied(completions, **columns):
    return [len(set(text)) + 0.1 * len(text) for text in completions]


def slow(completions, **columns):
    time.sleep(0.04)
    return varied(completions)


def held(completions, **columns):
    """Slow for as long as there is a file named hold."""
    if pathlib.Path("hold").exists():
        time.sleep(0.15)
    return varied(completions)


def stands(completions, **columns):
    """Waits once the run that the file named hold names has done as many steps as it says, until the file is gone."""
    while _is_to_stand():
        time.sleep(0.02)
    return varied(completions)


def _is_to_stand():
    try:
        name, steps = pathlib.Path("hold").read_text().split()
        return len(pathlib.Path("runs", name, "metrics.jsonl").read_text().splitlines()) >= int(steps)
    except (OSError, ValueError):
        return False


def equal(completions, **columns):
    return [1.0 for _ in completions]


def raises(completions, **columns):
    raise ValueError("no such column")


def nothing(completions, **columns):
    return [None for _ in completions]


def hangs_sometimes(completions, **columns):
    while any(text.startswith("1") for text in completions):
        pass
    return varied(completions)
'''


@dataclass
class Ran:
    """How a run ended, and its folder."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def counts(self) -> dict[str, Any]:
        return self.state["counts"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / "metrics.jsonl")

    @property
    def messages(self) -> str:
        return (self.folder / "messages.txt").read_text()

    @property
    def events(self) -> list[Event]:
        return read_events(self.folder)

    @property
    def weights(self) -> str:
        """Hash of the weights at the end, as the run itself printed it."""
        return self.out.rpartition("weights ")[2].partition(" ")[0]


def assert_accounted(ran: Ran) -> None:
    """Every sample has a terminal state, and nobody saw a traceback."""
    counts = ran.counts
    assert counts["in_flight"] == 0
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()), counts
    assert "Traceback" not in ran.err + ran.out, ran.err + ran.out


def assert_one_line(ran: Ran, *words: str) -> None:
    """The run's error is one line on stderr, and says what the words say."""
    lines = [line for line in ran.err.splitlines() if not line.startswith("headrace: warning")]
    assert len(lines) == 1 and lines[0].startswith("headrace: "), ran.err
    for word in words:
        assert word in lines[0], lines[0]


class Lab:
    """A folder with a config and reward functions, in which runs are started."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.source = folder, model, "c.toml"
        (folder / "rewards.py").write_text(REWARDS)
        self.config()

    def config(self, reward: str = "varied") -> None:
        text = CONFIG.format(model=str(self.model), reward=f"rewards.py:{reward}")
        (self.folder / "c.toml").write_text(text)

    def hold(self, name: str, steps: int) -> None:
        """A run of that name is to go no further than a step or two beyond so many, however late its test looks at it."""
        self.config(reward="stands")
        (self.folder / "hold").write_text(f"{name} {steps}")

    def let_go(self) -> None:
        (self.folder / "hold").unlink()

    def words(self, words: tuple[str, ...], resume: str | None) -> list[str]:
        start = ["run", "--resume", f"runs/{resume}"] if resume else ["run", self.source]
        return [*start, *words]

    def folder_of(self, words: list[str]) -> Path:
        name = Path(words[words.index("--resume") + 1]).name if "--resume" in words else "r"
        name = words[words.index("--name") + 1] if "--name" in words else name
        return self.folder / "runs" / name

    # ------------------------------------------------------------------------------------------- in this process

    def here(self, *words: str, resume: str | None = None) -> Ran:
        """With the parts that the config puts into the controller's process in this one: no imports to wait for."""
        return self.cli(self.words(words, resume))

    def cli(self, line: list[str]) -> Ran:
        """A whole command line."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", ["headrace", *line])
            self.capture.readouterr()
            with pytest.raises(SystemExit) as ended:
                cli.main()
        captured = self.capture.readouterr()
        return Ran(ended.value.code or 0, captured.out, captured.err, self.folder_of(line))

    capture: Any = None

    # ---------------------------------------------------------------------------------- in a process of its own

    def start(self, *words: str, resume: str | None = None) -> Running:
        line = self.words(words, resume)
        return Running(line, self.folder, self.folder_of(line))


class Running:
    """A run in a process of its own, in a process group of its own."""

    def __init__(self, words: list[str], cwd: Path, folder: Path) -> None:
        self.folder = folder
        self._out, self._err = (cwd / f"{folder.name}.out").open("w+b"), (cwd / f"{folder.name}.err").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", *words],
            cwd=cwd,
            stdout=self._out,
            stderr=self._err,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def wait(self, seconds: float = RUN_S) -> Ran:
        code = self.process.wait(seconds)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode())
        return Ran(code, *texts, self.folder)

    def workers(self, name: str = "") -> list[psutil.Process]:
        """The processes of parts whose name begins so (all parts by default)."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE and any(
                    word.startswith(f"headrace:{name}") for word in child.cmdline()
                ):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    def steps(self) -> int:
        return len(read_jsonl(self.folder / "metrics.jsonl"))

    def said(self, text: str) -> int:
        """How often the run said it so far."""
        path = self.folder / "messages.txt"
        return path.read_text().count(text) if path.exists() else 0

    def until(self, what: Callable[[], Any], seconds: float = RUN_S) -> Any:
        """Wait for something to hold while the run goes on."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert self.process.poll() is None, f"the run ended meanwhile: {self.wait().err}"
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.02)
        return found

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step)

    def kill(self) -> None:
        """SIGKILL to the controller alone."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Leave nothing behind, however the test went."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._out.close()
        self._err.close()


@pytest.fixture(scope="session")
def untrained(tmp_path_factory) -> Path:
    """The tiny model without its warm-up."""
    from headrace.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(folder, seed=0, warmup_steps=0)
    return folder


@pytest.fixture
def lab(tmp_path: Path, untrained: Path, capfd) -> Iterator[Lab]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Lab(tmp_path, untrained)
    made.capture = capfd
    started: list[Running] = []
    start = made.start

    def remembered(*words: str, resume: str | None = None) -> Running:
        started.append(start(*words, resume=resume))
        return started[-1]

    made.start = remembered  # type: ignore[method-assign]
    yield made
    for running in started:
        running.end()
    torch.set_num_threads(threads)
