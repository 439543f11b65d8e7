"""Whole runs whose engines compute with rounded weights: they learn, and say how far engine and trainer are apart."""

from __future__ import annotations

import pytest

from runs.launch import assert_accounted


def trained(ran) -> list[dict]:
    """Steps of which some group had an advantage."""
    rows = [row for row in ran.steps if "mismatch/logprob_diff_max" in row]
    assert len(rows) > len(ran.steps) / 2
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_a_run_with_rounded_weights_learns_and_reports_mismatch_and_correction(lab, weights, correction):
    # With old_logprobs = engine the loss's own ratio holds the weight already.
    words = ("training.loss.old_logprobs=trainer", "training.optimizer.lr=3e-3", "training.groups=8", "group.size=8")
    words += ("training.steps=20",)
    plain = lab.here(*words, f"training.correction.kind={correction}", "--name", "plain")
    ran = lab.here(*words, f"training.correction.kind={correction}", f"rollout.engine.weights={weights}")
    for one in (plain, ran):
        assert one.code == 0, one.err
        assert_accounted(one)
        got = [row["reward/mean"] for row in one.steps]
        assert sum(got[-3:]) / 3 > sum(got[:3]) / 3 + 0.5, got
    # Sync and one update a batch: without rounding, engine and trainer are the same policy.
    assert max(row["mismatch/logprob_diff_max"] for row in trained(plain)) < 1e-4
    assert all(row["engine/weight_error"] == 0 for row in plain.steps)
    low, high = {"bfloat16": (1e-3, 0.005), "int8": (4e-3, 0.03)}[weights]
    for row in trained(ran):
        assert low < row["engine/weight_error"] < high
        assert 1e-4 < row["mismatch/logprob_diff_mean"] < 0.1 and row["mismatch/k3"] > 0
        assert 0.8 < row["correction/weight_mean"] <= 1.1 and 0.8 < row["correction/weight_ess"] < 1
    report = lab.cli(["report", str(ran.folder)])
    assert "rounded by" in report.out and "mean weight" in report.out, report.out
