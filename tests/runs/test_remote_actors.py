"""Whole runs whose actors are processes that know nothing but an address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace import cli
from headrace.exchange.stores.redis_stream import connect
from headrace.orchestrator.remote.actor import run_actor
from runs.launch import RUN_S, Ran, Running, assert_accounted, assert_one_line

SMALL = ("env.target_return=none", "env.count=8", "env.steps=16", "rollout.source=redis")
SLOW = pytest.mark.slow


def test_impala_learns_from_actors_that_were_given_an_address(redis_server, tmp_path, monkeypatch, capfd):
    """The learner and two actors in threads of this process: they share nothing but the server."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    codes, told = [], []
    actors = [
        threading.Thread(target=lambda: codes.append(run_actor(redis_server.url, "alone", [], 60.0, told.append)))
        for _ in range(2)
    ]
    for thread in actors:
        thread.start()
    words = [*SMALL, f"buffer.url={redis_server.url}", "buffer.store=redis", "runtime=local", "training.steps=25"]
    monkeypatch.setattr(sys, "argv", ["headrace", "run", "impala", *words, "--name", "alone", "--display", "lines"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capfd.readouterr()
    ran = Ran(ended.value.code or 0, out, err, tmp_path / "runs" / "alone")
    for thread in actors:
        thread.join(30)
    torch.set_num_threads(threads)
    assert ran.code == 0 and len(ran.steps) == 25, ran.err
    assert_accounted(ran)
    assert ran.counts["trained"] == 25 and not ran.counts["dropped"].get("stale")
    assert codes == [0, 0] and "run alone is over" in told
    lags = [row["lag/step/max"] for row in ran.steps]
    assert 1 <= max(lags) <= 8, "versions are those that the actors really ran"
    acted = sum("acts for run alone" in line for line in told)
    assert acted >= 1 and ran.out.count("is here") == acted, (told, ran.out)
    assert connect(redis_server.url).keys("headrace:actors*") == [b"headrace:actors:alone:over"]


class Actors:
    """`headrace actor ADDRESS` in processes of their own, in a folder of their own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.processes = url, folder, []
        folder.mkdir()

    def start(self, *words: str) -> subprocess.Popen:
        log = (self.folder / f"{len(self.processes)}.log").open("wb")
        line = [sys.executable, "-m", "headrace.cli", "actor", self.url, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes.append(subprocess.Popen(line, stdout=log, stderr=log, cwd=self.folder, env=environment))
        return self.processes[-1]

    def log(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def actors(own_redis, tmp_path):
    made = Actors(own_redis.url, tmp_path / "elsewhere")
    yield made
    made.end()


@pytest.fixture
def learner(own_redis, tmp_path):
    started: list[Running] = []

    def begin(*words: str, resume: bool = False) -> Running:
        start = ["run", "--resume", "runs/r"] if resume else ["run", "impala", "--name", "r", *SMALL]
        url = [] if resume else [f"buffer.url={own_redis.url}"]
        started.append(Running([*start, *url, *words, "--display", "lines"], tmp_path, tmp_path / "runs" / "r"))
        return started[-1]

    yield begin
    for running in started:
        running.end()


@SLOW
def test_actors_and_server_are_killed_stopped_and_restarted_in_mid_run(learner, actors, own_redis):
    first = actors.start()
    running = learner("training.steps=1000000", "checkpoint.every_steps=0")
    running.until_step(5)
    first.kill()
    running.until(lambda: running.said("none is left"))
    actors.start()
    actors.start()
    running.until_step(running.steps() + 20)
    actors.processes[1].send_signal(signal.SIGSTOP)
    running.until(lambda: running.said("is gone"))
    running.until_step(running.steps() + 20)
    actors.processes[1].send_signal(signal.SIGCONT)
    own_redis.stop(signal.SIGKILL)  # with all that it had: nothing was written down
    own_redis.durable = False
    (own_redis.folder / "aof").mkdir()
    own_redis.folder = own_redis.folder / "aof"
    running.until(lambda: running.said("is away"))
    own_redis.start()
    running.until(lambda: running.said("server is back"))
    running.until_step(running.steps() + 20)
    running.process.send_signal(signal.SIGINT)
    ran = running.wait(RUN_S)
    assert ran.code == 130 and "Warning" not in ran.err, ran.err
    assert_accounted(ran)
    assert max(row["lag/step/max"] for row in ran.steps) <= 8
    assert [process.wait(RUN_S) for process in actors.processes[1:]] == [0, 0], actors.log(1) + actors.log(2)
    assert "is over" in actors.log(1) and "Traceback" not in actors.log(0) + actors.log(1) + actors.log(2)


@SLOW
def test_a_killed_learner_comes_back_to_the_actors_that_waited(learner, actors):
    actors.start("--run", "r")
    running = learner("training.steps=200000", "checkpoint.every_steps=10")
    running.until_step(25)
    running.kill()
    time.sleep(6)
    steps = running.steps()
    again = learner(f"training.steps={steps + 40}", resume=True)
    ran = again.wait(RUN_S)
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert ran.steps[-1]["step"] == steps + 40
    assert actors.processes[0].wait(RUN_S) == 0, actors.log(0)
    assert "waits for the learner" in actors.log(0) and actors.log(0).count("started anew") == 1


@SLOW
def test_what_a_user_gets_wrong_is_one_line(actors, learner, own_redis, tmp_path):
    def said(number: int) -> str:
        assert "Traceback" not in actors.log(number), actors.log(number)
        return actors.log(number)

    assert actors.start("--patience-s", "0.5").wait(RUN_S) == 1
    assert "no run wants actors at" in said(0)
    alone = learner("limits.stall_stop_s=1", "limits.stall_warning_s=1").wait(RUN_S)
    assert alone.code == 1
    assert_one_line(alone, "no actor came within 1 s", "headrace actor redis://")
    (tmp_path / "mine.py").write_text("import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n")
    running = learner(f"env.id={tmp_path / 'mine.py'}:make", "training.steps=5", "name=r")
    assert actors.start("--patience-s", "500").wait(RUN_S) == 2
    assert "--allow" in said(1)
    actors.start("--allow", f"{tmp_path / 'mine.py'}:make")
    assert running.wait(RUN_S).code == 0
