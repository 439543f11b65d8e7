"""Whole runs of control: they learn, repeat bit for bit, go on after a stop, and survive what breaks."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch

from headrace import assemble_control, cli
from headrace.exchange.codec import decode_unit, encode
from headrace.observability.report import build_report
from headrace.policies.shared_pass import SharedPass
from rollout.control_helpers import actor, collect
from runs.launch import Ran, Running, assert_accounted, assert_one_line

ENVIRONMENTS = Path(__file__).parents[1] / "rollout" / "control_envs.py"
SMALL = ["env.target_return=none", "env.count=8", "env.steps=16", "training.steps=8"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capfd):
    """Run a preset in this process, in a folder of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)

    def start(preset: str, *words: str, name: str = "r", resume: bool = False) -> Ran:
        line = ["run", "--resume", f"runs/{name}"] if resume else ["run", preset, "--name", name]
        monkeypatch.setattr(sys, "argv", ["headrace", *line, *words, "--display", "lines"])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Ran(ended.value.code or 0, out, err, tmp_path / "runs" / name)

    yield start
    torch.set_num_threads(threads)


@pytest.fixture
def start(tmp_path: Path):
    """Start a preset in processes of its own."""
    started: list[Running] = []

    def begin(preset: str, *words: str, name: str = "r") -> Running:
        line = ["run", preset, "--name", name, *words, "--display", "lines"]
        started.append(Running(line, tmp_path, tmp_path / "runs" / name))
        return started[-1]

    yield begin
    for running in started:
        running.end()


def test_cartpole_is_learned_and_the_report_says_how(run):
    ran = run("cartpole")
    assert ran.code == 0 and ran.steps[-1]["reward/mean"] >= 475, ran.out[-500:]
    assert len(ran.steps) < 120, "it used to take about 60 steps"
    assert_accounted(ran)
    assert "episodes/s" in ran.out and "steps/s" in ran.out
    report = build_report(ran.folder)
    text = str(report.text())
    assert "steps/s" in text and "lag of a step" in text and "bottleneck" in text
    assert "How do the episodes go?" in report.write_html(ran.folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_cartpole_is_learned_from_other_seeds(run, seed):
    ran = run("cartpole", f"seed={seed}")
    assert ran.code == 0 and ran.steps[-1]["reward/mean"] >= 475 and len(ran.steps) < 200


@pytest.mark.parametrize(
    ("recurrent", "seed"),
    [
        ("gru", 0),
        ("none", 0),
        *(pytest.param(kind, s, marks=pytest.mark.slow) for kind in ("gru", "lstm") for s in (1, 2)),
    ],
)
def test_only_a_memory_solves_what_has_to_be_remembered(run, recurrent, seed):
    """The bit shown at the first step is asked for at the fourth: without a memory half of the answers are right."""
    ran = run(
        "cartpole", f"env.id={ENVIRONMENTS}:make_recall", "env.target_return=0.97", "env.count=32", "env.steps=16",
        f"seed={seed}",
        f"policy.recurrent={recurrent}", "policy.recurrent_size=16", "policy.hidden=[16]",
        "training.steps=60", "training.epochs=2", "training.minibatches=2", "training.optimizer.lr=1e-2",
    )  # fmt: skip
    assert ran.code == 0
    assert ran.steps[-1]["reward/mean"] < 0.75 if recurrent == "none" else ran.steps[-1]["reward/mean"] >= 0.97


def test_a_seeded_run_repeats_bit_for_bit_and_another_seed_does_not(run):
    first, again, other = (
        run("cartpole", *SMALL, *more, name=n) for n, more in [("a", []), ("b", []), ("c", ["seed=1"])]
    )
    assert first.code == again.code == 0
    assert first.weights == again.weights != other.weights

    def figures(ran: Ran) -> list[dict]:
        return [{k: v for k, v in row.items() if k.startswith(("reward/", "episode/", "loss/"))} for row in ran.steps]

    assert figures(first) == figures(again)


def test_a_run_is_judged_by_whole_episodes_that_change_nothing(run):
    words = ["evaluation.source=episodes", "evaluation.count=9", "evaluation.every_steps=3", "evaluation.sampled=true"]
    judged, plain = run("cartpole", *SMALL, *words, name="a"), run("cartpole", *SMALL, name="b")
    assert judged.code == 0 and judged.weights == plain.weights
    rows = [json.loads(line) for line in (judged.folder / "evaluation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 3, 6, 8]
    assert all(row["count"] == 9 and row["length"] == row["greedy"] >= 8 and row["sampled"] >= 8 for row in rows)
    assert rows[0]["greedy"] < 100 and "held-out after 8 steps, 9 episodes" in judged.messages
    assert "held-out, greedy" in str(build_report(judged.folder).text())


def test_episodes_that_cannot_be_played_are_said_and_the_run_goes_on(run):
    """Two environments of 16 steps a batch are trained on for 8 steps; an episode of the judged ones never ends well."""
    broken = 'env.options={how="raises", after=50}'
    ran = run("cartpole", *SMALL, "env.count=1", "training.steps=3", "env.id=rollout.control_envs:make_misbehaving",
              broken, "evaluation.source=episodes")  # fmt: skip
    assert ran.code == 0 and "no episode could be played" in ran.messages and "the wheel is stuck" in ran.messages


def test_one_update_a_batch_goes_back_through_the_pass_that_acted(run, monkeypatch):
    """As a run whose trainer makes passes of its own, to rounding. (Small networks of tanh or relu have an update in one call.)"""
    once = [*SMALL, "policy.activation=elu", "training.epochs=1", "training.minibatches=1"]
    taken: list[bool] = []
    take = SharedPass.take
    monkeypatch.setattr(SharedPass, "take", lambda *a: (taken.append((found := take(*a)) is not None), found)[1])
    kept = run("cartpole", *once, name="kept")
    assert kept.code == 0, kept.err
    assert taken == [True] * 8
    monkeypatch.setattr(assemble_control, "acts_by_the_trainers_pass", lambda config: False)
    again = run("cartpole", *once, name="again")
    for one, other in zip(kept.steps, again.steps, strict=True):
        assert one["loss/total"] == pytest.approx(other["loss/total"], abs=1e-4)
        assert one["episode/count"] == other["episode/count"]


def test_a_stopped_run_goes_on_where_it_was(run):
    first = run("cartpole", *SMALL, "policy.normalise_observations=true", "algorithm.normalise_returns=true")
    trainer = json.loads((first.folder / "checkpoints/step_000008/model/trainer.json").read_text())
    assert trainer["returns"][0] > 0
    second = run("cartpole", "training.steps=12", resume=True)
    assert second.code == 0, second.err
    assert [row["step"] for row in second.steps] == list(range(1, 13))
    assert second.counts["trained"] == 12
    assert_accounted(second)
    returns = json.loads((first.folder / "checkpoints/step_000012/model/trainer.json").read_text())["returns"]
    assert returns[0] == pytest.approx(trainer["returns"][0] * 12 / 8, rel=0.05), "the running figures were saved"


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_curve(run):
    """Fewer episodes end in a batch the better the policy: the first batches after the stop are as good as the last before it."""
    words = ["env.target_return=none", "training.steps=20"]
    first = run("cartpole", *words)
    second = run("cartpole", "training.steps=23", resume=True)
    assert first.code == second.code == 0

    def ends(rows: list[dict]) -> float:
        return sum(row["episode/count"] for row in rows) / len(rows)

    start, before, after = first.steps[:3], first.steps[-3:], second.steps[20:]
    assert ends(start) > 3 * ends(before) and ends(after) < 2 * ends(before)


@pytest.mark.parametrize("how", ["raises", "nan", "reward"])
def test_an_environment_that_misbehaves_now_and_then_costs_its_trajectories_alone(run, how):
    ran = run(
        "cartpole", *SMALL, "env.id=rollout.control_envs:make_misbehaving", f'env.options={{how="{how}", after=60}}'
    )  # fmt: skip
    assert ran.code == 0 and len(ran.steps) == 8, ran.err
    assert_accounted(ran)


def test_one_that_always_raises_stops_the_run_with_its_words(run):
    ran = run("cartpole", *SMALL, "env.id=rollout.control_envs:make_misbehaving", 'env.options={how="raises", after=3}')
    assert ran.code == 1
    assert "the wheel is stuck" in ran.messages
    assert_one_line(ran, "16 units were dropped", "retries")
    assert_accounted(ran)


async def test_a_trajectory_travels_as_bytes():
    (unit,) = await collect(actor("counter", steps=4))
    back = decode_unit(encode(unit))
    assert back.sample_id == unit.sample_id and back.size == unit.size
    assert back.observations["obs"].tobytes() == unit.observations["obs"].tobytes()
    assert back.ended.tolist() == unit.ended.tolist() and back.initial_state is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preset", ["impala", "sample_factory"])
def test_asynchronous_architectures_learn_cartpole_with_bounded_lag(start, preset, seed):
    ran = start(preset, f"seed={seed}").wait(300)
    assert ran.code == 0 and ran.steps[-1]["reward/mean"] >= 475, ran.out[-500:]
    assert max(row["lag/step/max"] for row in ran.steps) <= 8
    assert max(row["lag/step/max"] for row in ran.steps) >= 1, "actors never ran ahead: this was no asynchronous run"
    assert_accounted(ran)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["impala", "sample_factory"])
def test_trajectories_may_stay_in_the_memory_of_actors_that_are_killed(start, preset):
    running = start(preset, "env.target_return=none", "buffer.store=shared_memory", "training.steps=1000000")
    running.until_step(10)
    running.workers("engine-0")[0].send_signal(signal.SIGKILL)
    running.until(lambda: running.said("engine-0 is replaced"))
    running.until_step(running.steps() + 10)
    running.process.send_signal(signal.SIGINT)
    ran = running.wait()
    assert ran.code == 130, ran.err
    assert_accounted(ran)


def test_a_killed_actor_is_replaced_and_a_killed_learner_ends_the_run_with_one_line(start):
    running = start("impala", *SMALL, "training.steps=1000000")
    running.until_step(10)
    running.workers("engine-1")[0].send_signal(signal.SIGKILL)
    running.until(lambda: running.said("engine-1 is replaced"))
    running.until_step(running.steps() + 10)
    running.workers("trainer")[0].send_signal(signal.SIGKILL)
    ran = running.wait()
    assert ran.code == 1
    assert_one_line(ran, "the trainer is gone")
    assert_accounted(ran)
    assert max(row["lag/step/max"] for row in ran.steps) <= 8


@pytest.mark.slow
def test_of_two_policy_workers_what_dies_or_stands_still_is_replaced_and_a_trainer_that_stands_still_ends_the_run(
    start,
):
    running = start("sample_factory", *SMALL, "training.steps=1000000", "rollout.engine.count=2", "env.workers=1",
                    "rollout.generate_timeout_s=8", "env.step_timeout_s=5", "limits.restarts=9",
                    "limits.stall_warning_s=10", "limits.stall_stop_s=40")  # fmt: skip
    running.until_step(5)
    (first,), (own,) = running.workers("engine-0"), running.workers("rollout-0-")
    assert len(running.workers("rollout-1-")) == 1
    own.send_signal(signal.SIGSTOP)  # its policy worker kills it and starts another
    running.until(lambda: [p for p in running.workers("rollout-0-") if p != own])
    running.until_step(running.steps() + 5)
    (own,) = running.workers("rollout-0-")
    first.send_signal(signal.SIGKILL)
    running.until(lambda: running.said("engine-0 is replaced"))
    running.until_step(running.steps() + 5)
    running.until(lambda: not own.is_running())  # it goes with its policy worker
    running.workers("engine-1")[0].send_signal(signal.SIGSTOP)
    running.until(lambda: running.said("engine-1 is given up"))
    running.until_step(running.steps() + 5)
    running.workers("trainer")[0].send_signal(signal.SIGSTOP)
    ran = running.wait()
    assert ran.code == 1
    assert_one_line(ran, "nothing moved")
    assert_accounted(ran)


def test_a_hanging_environment_is_given_up_and_its_actor_replaced(start):
    running = start(
        "impala", *SMALL, "training.steps=4", "rollout.generate_timeout_s=4", "rollout.engine.count=1", "limits.restarts=9",
        f"env.id={ENVIRONMENTS}:make_misbehaving", 'env.options={how="hangs", after=40}',
    )  # fmt: skip
    ran = running.wait()
    assert ran.code == 0 and len(ran.steps) == 4, ran.err
    assert "engine-0 is given up" in ran.messages and "engine-0 is replaced" in ran.messages
    assert_accounted(ran)
