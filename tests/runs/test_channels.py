"""Whole runs through each weight channel: what is learned does not depend on how the weights travel."""

from __future__ import annotations

import pytest

from headrace.exchange.channels import AVAILABLE
from runs.launch import assert_accounted


def test_the_channel_changes_nothing_of_what_is_learned(lab):
    first, *others = (lab.here("training.steps=3", f"weights.channel={kind}", "--name", kind) for kind in AVAILABLE)
    assert first.weights != ""
    for ran in others:
        assert ran.code == 0, ran.err
        assert ran.weights == first.weights and ran.counts == first.counts
    files = [path.name for path in (lab.folder / "runs/filesystem/weights/main").iterdir()]
    assert sorted(files) == ["0000000002.safetensors", "0000000003.safetensors", "latest.json"], (
        "old versions are pruned"
    )


def test_sending_what_changed_changes_nothing_either(lab):
    whole = lab.here("training.steps=4", "training.optimizer.lr=1e-5", "model.dtype=bfloat16", "--name", "whole")
    changed = lab.here(
        "training.steps=4",
        "training.optimizer.lr=1e-5",
        "model.dtype=bfloat16",
        "weights.scope=changed",
        "weights.channel=filesystem",
        "--name",
        "c",
    )
    assert changed.code == 0, changed.err
    assert changed.weights == whole.weights != "" and changed.counts == whole.counts


@pytest.mark.parametrize(
    "kind", ["collective", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ipc", "filesystem", "http"))]
)
def test_two_engines_in_processes_of_their_own_follow_the_trainer(lab, kind):
    ran = lab.here(
        "placement=separate",
        "runtime=processes",
        "rollout.engine.count=2",
        f"weights.channel={kind}",
        "training.steps=5",
    )
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert ran.counts["trained"] == 5 * 4
    assert not [event for event in ran.events if event.kind == "fenced"]
    swaps = [event.version for event in ran.events if event.kind == "swap"]
    assert swaps.count(5) == 2, "both engines run the last version"
