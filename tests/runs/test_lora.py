"""Whole runs that train adapters: they learn, engines compute what the trainer does, and a stopped run goes on."""

from __future__ import annotations

import pytest

from runs.launch import assert_accounted

LORA = ("training.lora.rank=8", "training.optimizer.lr=5e-3", "training.groups=8", "group.size=8")


def rewards(ran) -> list[float]:
    return [row["reward/mean"] for row in ran.steps]


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_a_run_learns_and_each_sync_brings_the_trainers_weights(lab, kind):
    ran = lab.here(f"training.lora.kind={kind}", *LORA, "training.steps=12", "training.loss.kl_coef=0.001")
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    got = rewards(ran)
    assert sum(got[-3:]) / 3 > sum(got[:3]) / 3 + 0.5, got
    # One update a batch, so that trainer and engine are at one version: the engine's is the one that came with the last sync.
    assert max(row["mismatch/logprob_diff_max"] for row in ran.steps) < 1e-4
    assert ran.steps[0]["loss/kl"] < 1e-6 < ran.steps[-1]["loss/kl"]
