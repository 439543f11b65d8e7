"""Figures from rows against hand-computed ones, and presets compared on a simulated cluster and in real runs."""

from __future__ import annotations

import math
import sys

import pytest

from headrace import cli
from headrace.comparison.figures import common_limits, figures_of, merge, reward_at
from headrace.comparison.table import cells, markdown_table, notes, text_table

ROWS = [
    {
        "time/elapsed_s": 10.0 + 2 * i,
        "time/step_s": 2.0,
        "time/wait_batch_s": 0.4,
        "time/wait_sync_s": 0.1,
        "length/mean": 50.0,
        "group/size_mean": 4.0,
        "lag/max": float(i),
        f"lag/hist/{i}": 6.0,
        "reward/mean": 0.1 * i,
        "correction/ess": 0.9,
        "sync/seconds": 0.5,
        "sync/standstill_s": 0.05,
        "idle/engine-0": 0.2,
        "idle/engine-1": 0.4,
    }
    for i in range(5)
]
ROWS[-1] |= {
    "drops/stale": 3.0,
    "drops/end": 7.0,
    "drops/seen_by_length/0-15": 100.0,
    "drops/seen_by_length/16-31": 100.0,
    "drops/by_length/0-15": 0.0,
    "drops/by_length/16-31": 0.5,
}


def test_figures_by_hand():
    """Four steps of 24 samples in the 8 s after the first, which holds the start-up."""
    found = figures_of("p", ROWS)
    assert (found.samples_per_s, found.tokens_per_s) == (12.0, 600.0)
    assert found.trainer_idle == pytest.approx(4 * 0.5 / 8)
    assert found.engine_idle == pytest.approx(0.3)
    assert (found.lag_mean, found.lag_max) == (2.0, 4.0)
    assert found.drops == {"stale": 3}, "units that were only left over at the end are not lost"
    assert found.length_bias == pytest.approx((100 * 7.5 + 50 * 23.5) / 150 / 15.5 - 1)
    assert (found.sync_s, found.standstill_s, found.ess) == pytest.approx((0.5, 0.05, 0.9))


def test_reward_at_equal_time_and_at_equal_samples():
    slow, fast = figures_of("slow", ROWS[:3]), figures_of("fast", [{**row, "time/elapsed_s": row["time/elapsed_s"] / 2} for row in ROWS])  # fmt: skip
    assert common_limits([slow, fast]) == (9.0, 72.0)
    assert reward_at(fast, 9.0, 0) == pytest.approx(0.2)
    assert reward_at(slow, 72.0, 1) == reward_at(fast, 72.0, 1) == pytest.approx(0.1)
    assert math.isnan(reward_at(slow, 1.0, 0))


def test_repetitions_give_medians():
    runs = [figures_of("p", [{**row, "length/mean": length} for row in ROWS]) for length in (10.0, 50.0, 20.0)]
    assert merge(runs).tokens_per_s == 12.0 * 20 and merge(runs).drops == {"stale": 9}


def test_repetitions_keep_their_range_and_share_their_rewards():
    better = [{**row, "reward/mean": row["reward/mean"] + 0.3, "time/elapsed_s": 10 + i} for i, row in enumerate(ROWS)]
    both = merge([figures_of("p", ROWS), figures_of("p", better)])
    assert both.between == (12.0, 24.0) and both.samples_per_s == 18.0
    assert cells([both], rewards=False)[1][1] == "18 (12-24)"
    assert common_limits([both]) == (14.0, 120.0), "what the slowest repetition reached"
    assert reward_at(both, 120.0, 1) == pytest.approx(0.35)


def test_a_run_without_steps_is_a_row_of_dashes():
    runs = [figures_of("bad", [], "it broke"), figures_of("good", ROWS)]
    table = cells(runs, rewards=True)
    assert table[1][:3] == ["bad*", "-", "-"] and notes(runs) == ["bad: it broke"]
    assert len({len(row) for row in table}) == 1
    assert markdown_table(table).count("\n") == 3 and "good" in text_table(table)


CLUSTER = """
generation = { engines = 2, rates = [[1, 50.0], [64, 1600.0]], max_running = 64 }
training = { tokens_per_s = 3000.0, step_s = 1.0 }
transport.default = { publish_s = 0.1, prepare_s = 0.2, commit_s = 0.01 }
workload = { median_tokens = 300.0, sigma = 1.0, max_tokens = 2048, prompt_tokens = 64, groups = 8, group_size = 4 }
"""


def compare(monkeypatch, capsys, *words: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["headrace", "compare", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr()
    assert not ended.value.code, out.err
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.out.splitlines() if line.startswith("|")]


def test_presets_on_a_simulated_cluster(monkeypatch, capsys, tmp_path):
    (tmp_path / "c.toml").write_text(CLUSTER)
    words = ("trl_sync", "skyrl", "pipelinerl", "--simulate", tmp_path / "c.toml", "training.steps=15", "--markdown")
    table = compare(monkeypatch, capsys, *words, "--out", tmp_path / "page.html")
    again = compare(monkeypatch, capsys, *words)
    assert table == again, "the same seed gives the same figures"
    head, _, *rows = table
    rate = {row[0]: float(row[head.index("samples/s")]) for row in rows}
    assert rate["skyrl"] > 1.5 * rate["trl_sync"], "what is cut and resumed runs ahead; what alternates does not"
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and all(name in page for name in rate)


def test_oversampling_cuts_the_wait_for_the_slowest_and_shows_its_bias(monkeypatch, capsys, tmp_path):
    """Goes when enough groups are complete; under `none` those cut off are lost, long ones first."""
    (tmp_path / "c.toml").write_text(CLUSTER.replace("sigma = 1.0", "sigma = 0.3, runaway = 0.02"))
    base = ("trl_sync", "weights.interruption=abort", "weights.partial=none", "--simulate", tmp_path / "c.toml")
    plain = compare(monkeypatch, capsys, *base, "training.steps=20", "--markdown")
    more = compare(monkeypatch, capsys, *base, "training.steps=20", "rollout.oversample=4", "--markdown")
    wait = plain[0].index("wait p99 s")
    assert float(more[2][wait]) < 0.5 * float(plain[2][wait])
    assert "interrupted" in more[2][plain[0].index("dropped")]
    bias = [float(table[2][plain[0].index("length bias")].rstrip("%")) for table in (plain, more)]
    assert bias[1] < bias[0] - 3, "long answers are lost"


@pytest.mark.parametrize(
    "words, expected",
    [
        (("seed=1",), "compare needs presets"),
        (("verl", "verl", "--nearest"), "a preset is named twice"),
        (("verl",), "add --nearest"),
        (("verl", "miles"), "; miles: "),
        (("verl", "--simulate", "absent.toml"), "'absent.toml' is no file"),
        (("verl", "--hours", "2", "--nearest"), "goes with --simulate"),
        (("verl", "--simulate", "cluster.toml", "--hours", "nan"), "--hours: found nan"),
        (("verl", "--simulate", "cluster.toml", "--hours=-3"), "--hours: found -3"),
        (("verl", "--simulate", "cluster.toml", "--out", "/nowhere/x.html"), "--out: '/nowhere/x.html' cannot"),
        (("verl", "--simulate", "cluster.toml", "--out", "/"), "--out: '/' cannot be written"),
        (("verl", "cartpole", "--simulate", "cluster.toml"), "'cartpole' acts in environments"),
        (("verl", "training.groups=3", "--simulate", "cluster.toml"), "training.groups: found 3, but"),
    ],
)
def test_what_cannot_be_compared_is_one_line(monkeypatch, capsys, words, expected):
    monkeypatch.setattr(sys, "argv", ["headrace", "compare", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    err = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(err) == 1 and expected in err[0]


@pytest.mark.parametrize(("trained", "code"), [(False, 1), (True, 0)])
def test_when_no_preset_trained_a_step_the_exit_code_says_so(monkeypatch, capsys, trained, code):
    made = [figures_of("verl", [], "it failed"), figures_of("slime", [{"time/elapsed_s": 1.0}] if trained else [])]
    monkeypatch.setattr("headrace.comparison.compare._simulate", lambda *given: made)
    monkeypatch.setattr(sys, "argv", ["headrace", "compare", "verl", "slime", "--simulate", "cluster.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code and "verl: it failed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_presets_really_run(monkeypatch, capsys, tmp_path):
    words = ("trl_sync", "openrlhf_partial", "--nearest", "--rounds", "2", "training.steps=4", "training.groups=16")
    table = compare(monkeypatch, capsys, *words, "--runs-dir", tmp_path / "runs", "--markdown", "evaluation.source=")
    assert [row[0] for row in table[2:]] == ["trl_sync", "openrlhf_partial"]
    for row in table[2:]:
        middle, spread = row[1].replace(",", "").rstrip(")").split(" (")
        low, high = map(float, spread.split("-"))
        assert 0 < low <= float(middle) <= high
    assert len(list((tmp_path / "runs").iterdir())) == 4
