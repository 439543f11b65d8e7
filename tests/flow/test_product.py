"""Interruption x partial policy x placement, the whole product: what is valid runs and does what it says, the rest is refused."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
from harness import Plan, assert_laws, simulate

from headrace.config import load_config
from headrace.configbase import field_types
from headrace.errors import ConfigError
from headrace.exchange.config import WeightsConfig
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.rollout.partial import PARTIAL_POLICIES, VALID_PAIRS
from headrace.valid_config import validate

CHOICES = field_types(WeightsConfig)
PRODUCT = list(
    itertools.product(
        get_args(CHOICES["interruption"]), get_args(CHOICES["partial"]), ("sync", "colocated", "separate")
    )
)


def versions_of(outcome) -> list[int]:
    """How many versions each trained sample's tokens are of."""
    samples = [episode.samples[0] for batch in outcome.learner.batches for group in batch for episode in group.episodes]
    return [len(np.unique(sample.policy_versions[sample.loss_mask == 1])) for sample in samples]


@pytest.mark.parametrize("interruption, partial, placement", PRODUCT)
def test_every_combination_runs_or_is_refused(interruption, partial, placement):
    valid = partial in VALID_PAIRS[interruption] and (placement, interruption) != ("colocated", "never")
    overrides = [f"placement={placement}", f"weights.interruption={interruption}", f"weights.partial={partial}"]
    if not valid:
        with pytest.raises(ConfigError, match=r"^weights\.(partial|interruption): found ") as refused:
            validate(load_config("quickstart", overrides))
        assert "\n" not in str(refused.value)
        return
    assert validate(load_config("quickstart", overrides)) == []
    plan = Plan(
        interruption=interruption,
        partial=partial,
        colocated=placement == "colocated",
        ahead=2 if placement == "separate" else 0,
        oversample=3,
        steps=10,
        train_s=0.5,
        costs=ScriptedCosts(length=50, length_sigma=1.2, token_s=0.1),
    )
    outcome = simulate(plan)
    assert outcome.error is None, outcome.error
    assert_laws(plan, outcome)
    # Groups started beyond the batch are running at every swap: what becomes of them is the partial policy's matter.
    drops, mixed = outcome.watcher.drops, max(versions_of(outcome)) > 1
    drained = interruption in ("drain", "barrier")
    keeps_prefix = PARTIAL_POLICIES[partial].keep_prefix and not drained
    assert mixed == keeps_prefix, "tokens of two versions in one sample: exactly where the prefix is kept"
    assert (drops["recycled"] > 0) == (partial == "recycle")
    assert (drops["interrupted"] > 0) == (interruption == "abort" and partial == "none")
