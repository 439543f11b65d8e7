"""Whole runs of the algorithms that learn from a replay or on a device, through the controller and buffer of every run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runs.launch import Lab, Ran, assert_accounted


@pytest.fixture
def run(tmp_path, capfd):
    """Start a preset in this process."""
    made = Lab(tmp_path, tmp_path)
    made.capture = capfd
    made.words = lambda words, resume: ["run", *(["--resume", f"runs/{resume}"] if resume else []), *words]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def start(preset, name, *words, resume=None):
        line = ("--display", "lines", *words)
        return made.here(*line, resume=resume) if resume else made.here(preset, "--name", name, *line)

    yield start
    torch.set_num_threads(threads)


SHORT = ("training.steps=8", "replay.learning_starts=300", "replay.draw=16", "replay.updates_per_step=0.02")


def test_a_seeded_run_repeats_and_its_units_are_accounted_for(run):
    words = (*SHORT, "replay.capacity=1100", "replay.priority=0.6")
    first, again = run("dqn", "a", *words), run("dqn", "b", *words)
    other = run("dqn", "c", *words, "seed=1")
    assert first.code == again.code == other.code == 0, first.err
    assert first.weights == again.weights != other.weights
    assert first.counts == {"submitted": 8, "trained": 8, "dropped": {}, "in_flight": 0}
    assert_accounted(other)
    rows = first.steps
    assert rows[0]["replay/updates"] == 0 and rows[-1]["replay/updates"] > 0
    assert rows[-1]["replay/resident_units"] == 4 and rows[-1]["replay/evicted_units"] == 4
    assert rows[-1]["replay/lag"] > 0 and rows[-1]["lag/max"] == 0


def test_a_resumed_run_has_its_replay_and_its_counts(run):
    words = (*SHORT, "replay.capacity=1100")
    first = run("dqn", "r", *words, "training.steps=6")
    assert first.code == 0 and first.counts["trained"] == 6, first.err
    resumed = run("dqn", "r", "training.steps=8", resume="r")
    assert resumed.code == 0, resumed.err
    assert resumed.counts == {"submitted": 8, "trained": 8, "dropped": {}, "in_flight": 0}
    row = next(row for row in resumed.steps if row["step"] == 7)
    assert row["replay/resident_units"] == 4 and row["replay/updates"] > 0, "it needs no second start"
    emptied = run("dqn", "e", *words, "training.steps=6", "replay.save=false")
    assert emptied.code == 0
    again = run("dqn", "e", "training.steps=7", resume="e")
    assert again.steps[-1]["replay/resident_units"] == 1 and again.counts["trained"] == 7


@pytest.mark.parametrize(
    "words, problem",
    [
        (("replay.capacity=500",), "replay.capacity: found 500"),
        (("replay.n_steps=40",), "replay.n_steps: found 40"),
        (("policy.recurrent=lstm",), "policy.recurrent: found 'lstm'"),
        (("policy.kind=actor_critic",), 'policy.kind: found "actor_critic" with algorithm.kind = "dqn"'),
        (("env.id=Pendulum-v1",), 'algorithm.kind: found "dqn", but the actions are not one discrete number'),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(run, words, problem):
    ran = run("dqn", "r", *SHORT, *words)
    assert ran.code == 2 and problem in ran.err and len(ran.err.splitlines()) == 1


def late_return(ran: Ran) -> float:
    """Mean return of the last ten batches in which episodes ended."""
    return float(np.mean([row["episode/return"] for row in ran.steps if row.get("episode/count")][-10:]))


SEEDS = pytest.mark.parametrize("seed", range(3))


@pytest.mark.slow
@SEEDS
def test_dqn_learns_to_balance(run, seed):
    ran = run("dqn", "learn", "training.steps=160", f"seed={seed}")
    assert ran.code == 0 and late_return(ran) > 300


@pytest.mark.slow
@SEEDS
def test_sac_learns_to_swing_up(run, seed):
    # Episodes of 200 steps end in every twelfth batch only, all at once: the last ten are the second half of the run.
    ran = run("sac", "learn", "training.steps=260", f"seed={seed}")
    assert ran.code == 0 and late_return(ran) > -300


@pytest.mark.slow
@SEEDS
def test_a_simulated_batch_learns_to_balance(run, seed):
    ran = run("tensor_sim", "learn", "training.steps=100", f"seed={seed}")
    assert ran.code == 0 and ran.steps[-1]["reward/mean"] >= 475


# --------------------------------------------------------------------------------------------------- on one device


def test_tensor_runs_repeat_and_go_on_where_they_were(run):
    words = ("env.count=64", "env.steps=16", "env.target_return=none")
    whole = run("tensor_sim", "whole", *words, "training.steps=4")
    again = run("tensor_sim", "again", *words, "training.steps=4")
    assert whole.code == again.code == 0 and whole.weights == again.weights, whole.err
    assert whole.counts == {"submitted": 4, "trained": 4, "dropped": {}, "in_flight": 0}
    assert whole.steps[-1]["batch/steps"] == 64 * 16 and whole.steps[-1]["episode/count"] > 0
    other = run("tensor_sim", "other", *words, "training.steps=4", "seed=1")
    assert other.weights != whole.weights


@pytest.mark.parametrize("words", [("runtime=processes", "placement=separate"), ("policy.recurrent=gru",)])
def test_simulators_serve_every_other_way_as_vector_environments(run, words):
    ran = run("tensor_sim", "v", "env.count=16", "env.steps=16", "training.steps=2", *words)
    assert ran.code == 0, ran.err
    refused = run("tensor_sim", "w", "env.device=cuda", *words)
    assert refused.code == 2 and 'env.device: found "cuda"; other devices are for env.id = "sim:..."' in refused.err
