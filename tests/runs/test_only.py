"""Half a flow: scored groups into files, and files into a trainer."""

from __future__ import annotations

import shutil

from headrace.exchange.codec import read_groups
from runs.launch import assert_accounted, assert_one_line


def test_rollout_writes_groups_and_train_learns_from_them(lab):
    rolled = lab.here("--only", "rollout", "training.steps=3", "--name", "half")
    assert rolled.code == 0, rolled.err
    assert "samples/s" in rolled.out and "--only train --samples" in rolled.out
    assert_accounted(rolled)
    groups = list(read_groups(rolled.folder / "groups"))
    assert len(groups) == 12 and all(len(group.scores) == 4 for group in groups)

    train = ("--only", "train", "--samples", "runs/half/groups")
    trained = lab.here(*train, "training.steps=9", "--name", "other")
    assert trained.code == 0, trained.err
    assert len(trained.steps) == 3, "a finite source: the run ends with it"
    assert_accounted(trained)
    again = lab.here(*train, "training.steps=9", "--name", "again")
    assert again.weights == trained.weights != "", "the same groups give the same weights"


def test_train_only_goes_on_where_it_was(lab):
    assert lab.here("--only", "rollout", "training.steps=4", "--name", "half").code == 0
    train = ("--only", "train", "--samples", "runs/half/groups", "training.steps=4", "checkpoint.every_steps=2")
    whole = lab.here(*train, "--name", "whole")
    assert whole.code == 0, whole.err
    shutil.rmtree(whole.folder / "checkpoints" / "step_000004")
    resumed = lab.here(resume="whole")
    assert resumed.code == 0, resumed.err
    assert resumed.weights == whole.weights
    (lab.folder / "runs" / "half" / "groups").rename(lab.folder / "elsewhere")
    gone = lab.here(resume="whole")
    assert gone.code == 2
    assert_one_line(gone, "samples", "not there any more")


def test_rollout_only_goes_on_where_it_was(lab):
    words = ("--only", "rollout", "training.steps=4", "checkpoint.every_steps=2")
    whole = lab.here(*words)
    assert whole.code == 0, whole.err
    ids = [group.task.task_id for group in read_groups(whole.folder / "groups")]
    # As a kill after step 3 would leave it: one checkpoint, groups beyond it, half a record at the end.
    shutil.rmtree(whole.folder / "checkpoints" / "step_000004")
    file = whole.folder / "groups" / "groups.groups"
    file.write_bytes(file.read_bytes()[:-7])
    resumed = lab.here(resume="r")
    assert resumed.code == 0, resumed.err
    assert [group.task.task_id for group in read_groups(whole.folder / "groups")] == ids
    assert_accounted(resumed)


def test_samples_that_are_none(lab):
    (lab.folder / "empty").mkdir()
    ran = lab.here("--only", "train", "--samples", "empty")
    assert ran.code == 2
    assert_one_line(ran, "no .groups file")
    (lab.folder / "bad.groups").write_bytes((5).to_bytes(8, "little") + b"hello")
    ran = lab.here("--only", "train", "--samples", "bad.groups")
    assert ran.code == 2
    assert_one_line(ran, "not a scored group")
    (lab.folder / "none.groups").write_bytes(b"")
    ran = lab.here("--only", "train", "--samples", "none.groups")
    assert ran.code == 2
    assert_one_line(ran, "holds no whole group")
