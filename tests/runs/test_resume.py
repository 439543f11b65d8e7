"""A run that ended, was stopped or was killed goes on where it was: same weights, same data position, same counts."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from runs.launch import assert_accounted, assert_one_line


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flow_of(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step_{step:06d}" / "flow.json").read_text())


def test_sync_killed_and_resumed_ends_with_the_same_weights(lab):
    words = ("training.steps=24", "checkpoint.every_steps=3", "training.advantage.drop_zero_variance=true")
    whole = lab.here(*words, "--name", "whole")
    assert whole.code == 0, whole.err

    lab.hold("killed", 20)
    running = lab.start(*words, "--name", "killed")
    running.until_step(random.randint(4, 12))
    time.sleep(random.random() * 0.3)
    running.kill()
    lab.let_go()
    assert running.steps() < 24, "it was to be killed on its way"

    resumed = lab.here(resume="killed")
    assert resumed.code == 0, resumed.err
    assert resumed.weights == whole.weights != ""
    assert_accounted(resumed)
    assert resumed.counts["trained"] == whole.counts["trained"] == 24 * 4
    model = "checkpoints/step_000024/model/model.safetensors"
    assert (resumed.folder / model).read_bytes() == (whole.folder / model).read_bytes()
    assert flow_of(resumed.folder, 24)["source"] == flow_of(whole.folder, 24)["source"]
    assert resumed.steps[-1]["optimizer/lr"] == whole.steps[-1]["optimizer/lr"]
    assert resumed.steps[-1]["flow/version"] > whole.steps[-1]["flow/version"], "a number never names two contents"
    assert {row["lag/max"] for row in resumed.steps} == {0.0}, "skipped numbers are no lag"


def test_more_steps_after_the_end_are_the_steps_of_a_longer_run(lab):
    long = lab.here("training.steps=5", "--name", "long")
    short = lab.here("training.steps=3", "--name", "short")
    assert short.counts == {"submitted": 12, "trained": 12, "dropped": {}, "in_flight": 0}, "nothing sampled in vain"
    more = lab.here("training.steps=5", resume="short")
    assert more.code == 0 and more.weights == long.weights
    assert more.counts == long.counts
    again = lab.here("training.steps=5", resume="short")
    assert again.code == 0 and again.weights == long.weights and "all 5 steps" in again.out


@pytest.mark.parametrize("file", ["flow.json", "model/model.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(lab, file):
    first = lab.here("checkpoint.every_steps=1", "training.steps=3")
    flip_a_byte(first.folder / "checkpoints" / "step_000003" / file)
    resumed = lab.here(resume="r")
    assert resumed.code == 0, resumed.err
    assert "step_000003 is passed over" in resumed.out
    assert resumed.weights == first.weights, "step 3 is trained again"
    assert_accounted(resumed)
    names = sorted(folder.name for folder in (first.folder / "checkpoints").iterdir())
    assert names == ["damaged_step_000003", "step_000002", "step_000003"]


def test_with_all_checkpoints_damaged_or_none_there_is_one_line(lab):
    ran = lab.here("training.steps=1")
    flip_a_byte(ran.folder / "checkpoints" / "step_000001" / "flow.json")
    none = lab.here(resume="r")
    assert none.code == 2
    assert_one_line(none, "no checkpoint", "step_000001", "flow.json")
    (ran.folder / "version.json").write_text("{")
    assert lab.here(resume="r").code == 2


def test_units_that_waited_are_trained_after_a_resume(lab):
    """A stopped asynchronous run holds finished and running groups: none of them is lost, none done twice."""
    words = ("placement=separate", "runtime=local", "training.steps=8", "rollout.oversample=3", "buffer.depth=double")
    ran = lab.here(*words, "checkpoint.every_steps=2")
    assert ran.code == 0, ran.err
    held = [flow_of(ran.folder, step) for step in (6, 8)]
    assert held[0]["running"] or held[0]["ready"]
    assert_accounted(ran)
    import shutil

    shutil.rmtree(ran.folder / "checkpoints" / "step_000008")
    resumed = lab.here(resume="r")
    assert resumed.code == 0, resumed.err
    assert resumed.counts["trained"] == 8 * 4
    assert_accounted(resumed)


def test_a_second_run_needs_another_name(lab):
    assert lab.here("training.steps=1").code == 0
    before = (lab.folder / "runs" / "r" / "metrics.jsonl").read_bytes()
    second = lab.here("training.steps=1")
    assert second.code == 2
    assert_one_line(second, "exists already", "--name", "--resume")
    assert (lab.folder / "runs" / "r" / "metrics.jsonl").read_bytes() == before
