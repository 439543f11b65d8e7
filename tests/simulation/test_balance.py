"""Parts that are equally quick alone: side by side they lose almost nothing, one after the other half."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "controller.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("controller_benchmark", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ahead, sigma, train_s", [(1, 0.0, 64.0), (1, 0.05, 74.0), (2, 0.05, 74.0)])
def test_separate_reaches_the_pace_of_one_part_alone(benchmark, ahead, sigma, train_s):
    """With a spread of 5% a batch's longest of 128 answers takes some 74 s."""
    throughput, idle = benchmark.balance(benchmark.balanced(20, ahead=ahead, sigma=sigma, train_s=train_s))
    assert throughput >= 0.97 and idle < 0.03


def test_alternating_takes_the_sum(benchmark):
    throughput, idle = benchmark.balance(benchmark.balanced(20, ahead=0))
    assert throughput == pytest.approx(0.5, abs=0.02) and idle == pytest.approx(0.5, abs=0.02)
