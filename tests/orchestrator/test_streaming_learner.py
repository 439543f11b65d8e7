"""A trainer that starts on a batch before it is complete makes the weights of one that waited for it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from headrace.config import load_config
from headrace.errors import ConfigError
from headrace.orchestrator.learner import TokenLearner
from headrace.training.backends.single_device import build_single_device
from headrace.training.config import LossConfig, OptimizerConfig, TrainingConfig
from headrace.types import Score
from headrace.valid_config import validate
from training.helpers import context, random_group, save_tiny


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
async def test_the_gradient_of_parts_is_that_of_the_whole(tmp_path, normalise):
    torch.set_num_threads(1)
    folder = save_tiny(tmp_path / "model")
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}") for i in range(5)]
    loss = LossConfig(kl_coef=0.05, normalise=normalise)
    waiting = TrainingConfig(groups=5, micro_tokens=60, loss=loss, optimizer=OptimizerConfig(lr=0.01))
    streaming = msgspec.structs.replace(waiting, stream_groups=1)
    weights, totals, norms = [], [], []
    for config in (waiting, streaming):
        backend = build_single_device(context(), config, folder, "float32", None, 8)
        learner = TokenLearner(backend, config, max_length=8)
        if config.stream_groups:
            for part in (groups[3:4], groups[:2], groups[2:3], groups[4:]):
                await learner.begin(part)
        metrics = await learner.train(groups)
        totals.append(metrics["loss/total"].mean)
        norms.append(metrics["optimizer/grad_norm"].mean)
        weights.append(torch.cat([t.flatten() for _, t in backend.named_tensors()]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert totals[1] == pytest.approx(totals[0], rel=1e-5, abs=1e-7)
    # AdamW's first step is the gradient's sign: compare where it is not rounding that decides.
    assert float((weights[0] - weights[1]).abs().mean()) < 1e-6


async def test_a_batch_without_any_gradient_takes_no_step(tmp_path):
    folder = save_tiny(tmp_path / "model")
    config = TrainingConfig(groups=1, stream_groups=1)
    learner = TokenLearner(build_single_device(context(), config, folder, "float32", None, 8), config, max_length=8)
    group = random_group(np.random.default_rng(1))
    group = replace(group, scores=tuple(Score(reward=1.0) for _ in group.scores))
    before = await learner.backend.fingerprint()
    await learner.begin([group])
    metrics = await learner.train([group])
    assert "optimizer/lr" not in metrics and await learner.backend.fingerprint() == before


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["training.stream_groups=9"], "training.stream_groups: found 9, more than training.groups = 8"),
        (["training.stream_groups=1", "training.epochs=2"], "found 1 with 2 updates a batch"),
        (["training.stream_groups=1", "training.loss.function=a.b:c"], "found 1 with training.loss.function"),
    ],
)
def test_what_cannot_stream_is_refused(overrides, expected):
    with pytest.raises(ConfigError, match=expected.replace("(", r"\(")):
        validate(load_config("quickstart", overrides))
