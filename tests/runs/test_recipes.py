"""The one-file recipes of control still run against the library, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "words", "target"),
    [
        ("02_ppo_in_one_file.py", ["--batches", "40"], 60),
        ("03_vtrace_actors.py", ["--batches", "400"], 120),
        ("02_ppo_in_one_file.py", ["--batches", "200"], 475),
    ],
)
def test_a_recipe_learns_to_its_target(recipe, words, target):
    line = [sys.executable, str(RECIPES / recipe), *words, "--target", str(target)]
    ran = subprocess.run(
        line, capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert ran.returncode == 0, ran.stderr
    returns = [float(found) for found in re.findall(r"return +([\d.]+)", ran.stdout)]
    assert returns[-1] >= target > 1.5 * min(r for r in returns if r), ran.stdout[-300:]
