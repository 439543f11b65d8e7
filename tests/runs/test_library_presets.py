"""Every library's preset: marked line by line, told what is missing, and trained for a few steps with the nearest parts."""

from __future__ import annotations

import re

import pytest

from headrace.config import LIBRARIES_FOLDER, dump_config, library_names, load_config, resolve
from headrace.errors import ConfigError
from headrace.nearest import exchanged, substitute
from headrace.valid_config import validate
from runs.launch import assert_accounted, assert_one_line

SURVEYED = """areal areal_ray art atropos miles nemo_rl oat open_instruct openrlhf_async openrlhf_hybrid openrlhf_partial
pipelinerl prime_rl roll skyrl slime slime_fully_async torchforge trl_async trl_sync tunix verifiers_rl verl verl_fully_async"""
SAMPLE = ("pipelinerl",)
"""Never stops and streams, in processes of their own; with the others' runtimes and channels these are slow tests."""
ONE_PROCESS = ("runtime=local", "weights.channel=in_process")


def test_every_row_of_the_table_is_there():
    assert library_names() == SURVEYED.split()


@pytest.mark.parametrize("name", library_names())
def test_each_line_says_where_it_is_from(name):
    lines = [line for line in (LIBRARIES_FOLDER / f"{name}.toml").read_text().splitlines() if line.strip()]
    assert lines[0].startswith("# ") and 10 <= len(lines) <= 25
    for line in lines[1:]:
        assert re.search(r"#.*\b(survey|own reading)\b", line), line


@pytest.mark.parametrize("name", library_names())
def test_the_nearest_parts_make_a_config_that_can_run(name):
    config, exchanges = exchanged(load_config(name), allowed=True)
    validate(config)
    assert config.name == name and config.tasks.source == "sums", "on the work of tiny"
    assert substitute(config)[1] == []
    if exchanges:
        with pytest.raises(ConfigError, match="add --nearest") as refused:
            exchanged(load_config(name), allowed=False)
        line = str(refused.value)
        assert "\n" not in line and all(f'{e.path} = "{e.found}"' in line and e.nearest in line for e in exchanges)


def test_axes_are_laid_over_work_and_overrides_over_both(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("group.size = 5\n[weights]\nevery_steps = 2\n")
    config = load_config(f"tiny+verl+{mine}", ["training.steps=7"])
    assert (config.name, config.weights.interruption, config.weights.every_steps) == ("verl", "drain", 2)
    assert (config.group.size, config.training.steps, config.training.groups) == (5, 7, 128)
    assert "verl" in dump_config(resolve(config))


def test_a_run_names_what_is_not_here_and_stops(lab):
    lab.source = "c.toml+tunix"
    assert_one_line(lab.here(), 'weights.channel = "mesh"', 'training.backend = "jax"', "add --nearest")


@pytest.mark.parametrize("name", library_names())
def test_it_trains_in_one_process(lab, name):
    """All of its axes but where the parts live and how they are reached: quick, so every preset is tried each time."""
    lab.source = f"c.toml+{name}"
    ran = lab.here("--nearest", "--name", "r", "training.steps=2", "training.groups=2", "rollout.max_in_flight=4", *ONE_PROCESS)  # fmt: skip
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert len(ran.steps) == 2 and all(row["optimizer/grad_norm"] > 0 for row in ran.steps)
    preset, used = load_config(name), load_config(str(ran.folder / "config.toml"))
    for axis in ("placement", "staleness"):
        assert getattr(used, axis) == getattr(preset, axis)
    for axis in ("interruption", "partial"):
        assert getattr(used.weights, axis) == getattr(preset.weights, axis)
    assert (used.buffer.depth, used.training.correction) == (preset.buffer.depth, preset.training.correction)


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in library_names()]
)
def test_it_trains_with_the_nearest_parts(lab, name):
    lab.source = f"c.toml+{name}"
    elsewhere = ["runtime=auto"] if name in SAMPLE else []  # a cluster of Ray takes half a minute to come and go
    ran = lab.here("--nearest", "--name", "r", "training.steps=3", "rollout.max_in_flight=8", *elsewhere)
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert len(ran.steps) == 3
    said = [line for line in ran.err.splitlines() if line.endswith(", which is used")]
    assert len(said) == len(substitute(load_config(name, elsewhere))[1])
