"""Bad days of whole runs, with real processes: a clear line, a terminal state for every sample, no hang, no traceback."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import threading
import time

import psutil
import pytest

from runs.launch import assert_accounted, assert_one_line

pytestmark = pytest.mark.timeout(400)

SEPARATE = ("placement=separate", "training.steps=30", "checkpoint.every_steps=2")


def gone(processes: list[psutil.Process], seconds: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


# ------------------------------------------------------------------------------------------------ processes that die


@pytest.mark.slow
def test_engines_killed_and_stopped_in_mid_group_are_replaced_and_the_run_goes_on(lab):
    """One engine is killed at a random moment, the other is stopped, so that a weight sync waits for it in vain."""
    lab.config(reward="held")
    (lab.folder / "hold").touch()
    running = lab.start(
        *SEPARATE,
        "rollout.engine.count=2",
        "weights.prepare_timeout_s=2",
        "weights.rejoin_timeout_s=150",
        "training.steps=60",
        "rollout.sampling.max_tokens=24",
        "limits.restarts=5",
    )
    running.until_step(random.randint(1, 3))
    time.sleep(random.random() * 0.5)
    running.workers("engine-0")[0].kill()
    running.until(lambda: running.said("is replaced") >= 1)
    stopped = running.workers("engine-1")[0]
    stopped.suspend()
    running.until(lambda: running.said("is replaced") >= 2)
    assert gone([stopped]), "a fenced engine is killed, stopped or not"
    (lab.folder / "hold").unlink()
    ran = running.wait()
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert ran.counts["trained"] == 60 * 4
    assert ran.messages.count("is given up") == 2 and ran.messages.count("is replaced") == 2
    assert "killed by SIGKILL" in ran.messages and "prepare: engine-1.prepare gave no answer within 2 s" in ran.messages
    live = 0
    for event in (event for event in ran.events if event.source == "controller"):
        live = event.version if event.kind == "live" else live
        assert event.kind != "joined" or event.version >= live, "a joiner runs the newest weights"


def test_a_killed_trainer_ends_the_run_and_resume_finishes_it(lab):
    lab.hold("r", 3)
    running = lab.start(*SEPARATE, "training.steps=12")
    running.until(lambda: (running.folder / "checkpoints" / "step_000002" / "manifest.json").exists())
    time.sleep(random.random() * 0.3)
    workers = running.workers()
    assert {worker.cmdline()[-1] for worker in workers} >= {
        "headrace:engine-0",
        "headrace:trainer",
        "headrace:reward-0",
    }
    running.workers("trainer")[0].kill()
    lab.let_go()
    ran = running.wait()
    assert ran.code == 1
    assert_one_line(ran, "the trainer is gone", "SIGKILL", "--resume")
    assert_accounted(ran)
    assert ran.state["state"] == "failed" and ran.state["steps"] < 12
    assert gone(workers)
    _finishes(lab)


@pytest.mark.slow
def test_a_killed_controller_leaves_no_process_and_resume_finishes_the_run(lab):
    lab.hold("r", 4)
    running = lab.start(*SEPARATE, "training.steps=12")
    running.until(lambda: (running.folder / "checkpoints" / "step_000002" / "manifest.json").exists())
    for steps in (6, 8):
        time.sleep(random.random() * 0.3)
        workers = running.workers()
        assert len(workers) >= 3
        running.kill()
        assert gone(workers), "workers outlive their controller"
        lab.hold("r", steps)
        before = running.said("checkpoint checkpoints")
        running = lab.start(resume="r")
        running.until(lambda running=running, before=before: running.said("checkpoint checkpoints") > before)
    running.end()
    lab.let_go()
    _finishes(lab)


def _finishes(lab):
    finished = lab.here("runtime=local", "buffer.depth=double", resume="r")
    assert finished.code == 0, finished.err
    assert_accounted(finished)
    assert finished.counts["trained"] == 12 * 4 and finished.state["steps"] == 12


# ------------------------------------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize(
    ("whole_group", "number"),
    [
        (True, signal.SIGINT),
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(False, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_stop_signal_ends_with_a_checkpoint_and_resume_does_the_rest(lab, whole_group, number):
    """A terminal sends Ctrl-C to the whole process group, as a batch scheduler its SIGTERM; `kill -2` goes to the controller alone."""
    lab.config(reward="slow")
    words = ("runtime=processes", "placement=separate") if whole_group else ()
    running = lab.start(*words, "training.steps=60")
    running.until_step(2)
    time.sleep(random.random() * 0.3)
    if whole_group:
        os.killpg(running.process.pid, number)
    else:
        running.process.send_signal(number)
    ran = running.wait()
    assert ran.code == 130, ran.err
    assert ran.err == "" and "stopping after this step" in ran.out
    assert_accounted(ran)
    steps = ran.state["steps"]
    assert ran.state["state"] == "stopped" and 2 <= steps < 60
    flow = json.loads((ran.folder / "checkpoints" / f"step_{steps:06d}" / "flow.json").read_text())
    assert flow["step"] == steps
    assert f"go on from step {steps} with: headrace run --resume" in ran.out
    for line in ran.out.splitlines():  # each line shows the figures of its own step
        if found := re.match(r"step +(\d+)/60 +reward +([\d.]+)", line):
            assert float(found[2]) == pytest.approx(ran.steps[int(found[1]) - 1]["reward/mean"], abs=6e-4), line
    resumed = lab.here(f"training.steps={steps + 2}", *(["runtime=local"] if whole_group else []), resume="r")
    assert resumed.code == 0, resumed.err
    assert_accounted(resumed)
    assert resumed.counts["trained"] == (steps + 2) * 4


STANDS = """
import pathlib
import time

from headrace.training.losses import LOSSES


def stands(inputs):
    while pathlib.Path("hold").exists():
        pathlib.Path("stands").touch()
        time.sleep(0.02)
    return LOSSES["clipped"](inputs)
"""


@pytest.mark.slow
def test_ctrl_c_twice_and_ctrl_c_before_the_run_began(lab):
    """The second one ends a run whose step in hand does not."""
    (lab.folder / "loss.py").write_text(STANDS)
    running = lab.start("placement=separate", "training.steps=100_000", "training.loss.function=loss.py:stands")
    running.until_step(1)
    (lab.folder / "hold").touch()
    running.until((lab.folder / "stands").exists)
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert running.process.poll() is None, "it waits for the step in hand"
    running.process.send_signal(signal.SIGINT)
    ran = running.wait()
    assert ran.code == 130 and "Traceback" not in ran.err, ran.err
    assert ran.state["state"] == "stopped" and "stopped at once; there is no checkpoint" in ran.out
    assert_accounted(ran)

    early = lab.start("--name", "early")
    early.until(lambda: (early.folder / "config.toml").exists())
    time.sleep(random.random())
    early.process.send_signal(signal.SIGINT)
    ran = early.wait()
    assert ran.code == 130 and "Traceback" not in ran.err, ran.err
    assert not ran.folder.exists() or (ran.folder / "run.json").exists(), "a run that never began leaves nothing"


# ---------------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("reward", ["raises", "nothing"])
def test_rewards_that_never_score_starve_the_run_with_a_remedy(lab, reward):
    lab.config(reward)
    ran = lab.here("limits.max_dropped=8")
    assert ran.code == 1
    assert_one_line(ran, "8 units were dropped", "unscored", "headrace check")
    assert_accounted(ran)
    assert ran.state["state"] == "failed" and "Starved" in ran.state["error"]
    if reward == "raises":
        assert "no such column" in ran.messages
        assert ran.messages.count("no such column") == 1, "told once"


def test_a_reward_that_hangs_sometimes_costs_its_samples_and_not_the_run(lab):
    lab.config("hangs_sometimes")
    ran = lab.here("reward.timeout_s=0.5", "reward.workers=2", "group.min_complete=1", "training.steps=3")
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert len(ran.steps) == 3
    assert sum(row.get("reward/timeouts", 0) for row in ran.steps) > 0, sorted(ran.steps[-1])


def test_equal_rewards_for_ever_train_finite_zeros_or_stop_when_they_are_left_out(lab):
    lab.config("equal")
    ran = lab.here("training.steps=6")
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert all(row["batch/empty"] == 1.0 and None not in row.values() for row in ran.steps), ran.steps[-1]
    assert ran.messages.count("nothing is learned") == 1
    ran = lab.here("training.advantage.drop_zero_variance=true", "limits.max_dropped=10", "--name", "dropped")
    assert ran.code == 1
    assert_one_line(ran, "10 filtered", "all scores of a group are equal", "drop_zero_variance")
    assert_accounted(ran)


def test_all_answers_cut_off_and_masked_train_on_nothing_and_are_counted(lab):
    ran = lab.here("training.loss.mask_truncated=true", "rollout.sampling.max_tokens=1", "training.steps=2")
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    for row in ran.steps:
        assert row["length/truncated_share"] > 0.5, "an untrained model seldom ends at once"
        assert row["batch/masked_sequences"] == 16 * row["length/truncated_share"]
        assert None not in row.values(), "NaN is written as null"


# ------------------------------------------------------------------------------------------------------------ tasks


def test_task_files_that_are_empty_holed_short_or_too_long(lab):
    def run(*rows, name, **more):
        (lab.folder / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))
        words = [f"{key.replace('__', '.')}={value}" for key, value in more.items()]
        return lab.here(f"tasks.source=jsonl:{name}.jsonl", "tasks.options={}", *words, "--name", name)

    def task(text):
        return json.dumps({"prompt": text, "answer": "1"})

    empty = run(name="empty")
    assert empty.code == 2 and not empty.folder.exists()
    assert_one_line(empty, "holds no tasks")

    short = run(task("1+1="), "", task("2+2="), name="short", tasks__epochs=1)
    assert short.code == 0, short.err
    assert short.counts == {"submitted": 2, "trained": 2, "dropped": {}, "in_flight": 0}, "a short batch is trained"

    long = "1" * 200
    some = run(task(long), task("1+1="), name="some", training__steps=2)
    assert some.code == 0, some.err
    assert_accounted(some)
    assert some.counts["dropped"] == {"refused": some.counts["dropped"]["refused"]}
    assert some.messages.count("dropped (refused)") == 1 and "200" in some.messages, some.messages

    every = run(task(long), name="every", limits__max_dropped=6)
    assert every.code == 1
    assert_one_line(every, "6 refused", "context")
    assert_accounted(every)

    once = run(task(long), name="once", tasks__epochs=1)
    assert once.code == 1
    assert_one_line(once, "0 steps", "1 refused", "context")
    assert once.state["state"] == "failed"

    (lab.folder / "none.py").write_text("def tasks():\n    return iter(())\n")
    nothing = lab.here("tasks.source=none.py:tasks", "tasks.options={}", "--name", "nothing")
    assert nothing.code == 1
    assert_one_line(nothing, "0 steps", "no tasks")


# -------------------------------------------------------------------------------------------------- users' mistakes


def test_mistakes_found_while_the_parts_are_built_are_one_line_and_leave_nothing(lab):
    for words in (
        ("reward.functions=[{use='rewards.py:absent'}]",),
        ("reward.functions=[{use='missing.py:varied'}]",),
        ("rollout.function=rewards.py:absent",),
    ):
        ran = lab.here(*words)
        assert ran.code == 2, (words, ran.err)
        assert_one_line(ran)
        assert not ran.folder.exists(), list(ran.folder.iterdir())
    # The model's folder is right at first sight; the engine finds out that its weights are not.
    weights = lab.model / "model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[: len(whole) // 2])
        ran = lab.here()
    finally:
        weights.write_bytes(whole)
    assert ran.code in (1, 2)
    assert_one_line(ran)
    assert not ran.folder.exists()


# -------------------------------------------------------------------------------------------------------- disk full


def test_a_disk_full_at_a_checkpoint_leaves_the_last_good_one(lab):
    """No file may grow beyond half a megabyte from some moment on: the weights fit no more, the small files do."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk() -> None:
        while not (lab.folder / "runs" / "r" / "checkpoints" / "step_000002").exists():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))

    filling = threading.Thread(target=fill_the_disk, daemon=True)
    filling.start()
    try:
        ran = lab.here("training.steps=8", "checkpoint.every_steps=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ran.code == 1
    assert_one_line(ran, "step 8 could not be written", "headrace run --resume")
    assert_accounted(ran)
    assert ran.state["steps"] == 8, "a run goes on without its checkpoints"
    assert "earlier ones stay" in ran.messages
    resumed = lab.here("training.steps=8", resume="r")
    assert resumed.code == 0, resumed.err
    assert "passed over" not in resumed.out
    assert_accounted(resumed)
    assert resumed.counts["trained"] == 8 * 4
