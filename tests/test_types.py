"""Shortcuts of the shared types equal the plain way."""

from dataclasses import replace

from headrace.types import SamplingParams


def test_with_seed_is_replace():
    sampling = SamplingParams(max_tokens=7, temperature=0.5, stop=("a",), top_k=3)
    assert sampling.with_seed(9) == replace(sampling, seed=9)
    assert sampling.seed is None, "the original stays"
