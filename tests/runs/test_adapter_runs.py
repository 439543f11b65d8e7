"""Whole runs that train adapters: they learn, engines compute what the trainer does, and a stopped run goes on."""

from __future__ import annotations

import json

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
    # Of eight siblings seven find their prompt computed, step after step, though each sync clears the cache. An engine may have been
    # asked when the first of each group of a step were in, and nobody yet who shares with them: then after m steps it is 7 m / (8 m + 1).
    hits = [row["engine/prefix_hit_rate"] for row in ran.steps]
    assert max(hits) == pytest.approx(7 / 8, abs=1e-6), hits
    assert any(
        hits[-1] == pytest.approx(one, abs=1e-6) for one in (7 / 8, *(7 * m / (8 * m + 1) for m in range(1, 12)))
    ), hits
    last = ran.steps[-1]
    assert last["engine/preemptions"] == 0
    assert last["engine/decode_s"] > last["engine/prefill_s"] >= 0 and 0 <= last["engine/kv_occupancy"] <= 1


@pytest.mark.parametrize("kind", ["adapter", pytest.param("merged", marks=pytest.mark.slow)])
def test_a_run_in_processes_learns_and_every_engine_follows(lab, kind):
    finish = "weights.kv_on_swap=" + ("finish" if kind == "adapter" else "keep")
    words = ("placement=separate", "runtime=processes", "rollout.engine.count=2", finish)
    ran = lab.here(f"training.lora.kind={kind}", *LORA, *words, "training.steps=16")
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    got = rewards(ran)
    assert sum(got[-3:]) / 3 > sum(got[:3]) / 3 + 0.3, got
    swaps = [event.version for event in ran.events if event.kind == "swap"]
    assert swaps.count(16) == 2, "both engines run the last version"


def test_engines_and_trainer_in_turns(lab):
    """The engine gives its base up at each turn and reads it again from the model's folder."""
    turns = ("placement=colocated", "weights.interruption=drain", "weights.partial=none")
    words = ("training.lora.kind=adapter", *LORA, "training.steps=3")
    ran, plain = lab.here(*words, *turns, "--name", "turns"), lab.here(*words, "--name", "plain")
    assert ran.code == 0, ran.err
    assert ran.weights == plain.weights != ""


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_a_resumed_run_ends_with_the_same_adapters(lab, kind):
    words = (f"training.lora.kind={kind}", *LORA)
    whole = lab.here(*words, "training.steps=4", "--name", "whole")
    part = lab.here(*words, "training.steps=2", "--name", "part")
    model = part.folder / "checkpoints" / "step_000002" / "model"
    assert json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"] == str(lab.model)
    assert not (model / "model.safetensors").exists()
    resumed = lab.here("training.steps=4", resume="part")
    assert resumed.code == 0, resumed.err
    assert resumed.weights == whole.weights != part.weights
    assert resumed.counts == whole.counts
