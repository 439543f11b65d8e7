"""Faults of group baselines and KL terms that users of such software have met, reduced to small numbers (G1-G6, K1)."""

import logging
import math

import numpy as np
import pytest
import torch

from headrace.training.advantages import group_advantages
from headrace.training.batching import make_batches
from headrace.training.config import AdvantageConfig, LossConfig, TrainingConfig
from headrace.training.losses import kl_terms, loss_function
from headrace.training.metrics import batch_metrics
from training.helpers import group_of, sample_of
from training.test_losses import inputs_of


def advantages_of(rewards, kind="dr_grpo"):
    group = group_of([sample_of([5, 6], [7, 8])] * len(rewards), rewards)
    return group_advantages([group], AdvantageConfig(kind=kind))[0]


def test_leave_one_out_does_not_divide_by_the_residue_of_equal_rewards():
    """G1"""
    found = advantages_of([0.0] + [0.95] * 7, "leave_one_out")
    assert found[0] == pytest.approx(-0.95)
    assert found[1] == pytest.approx(0.95 / 7)
    assert (advantages_of([0.95] * 8, "leave_one_out") == 0).all()


def test_an_unscored_episode_is_left_out_of_the_baseline_and_of_the_mean():
    """G2"""
    found = advantages_of([1.0, 1.0, None, 1.0])
    assert found[[0, 1, 3]].tolist() == [0, 0, 0] and np.isnan(found[2])
    group = group_of([sample_of([5, 6], [7, 8])] * 4, [1.0, 1.0, None, 1.0])
    metrics = batch_metrics([group])
    assert metrics["reward/mean"].mean == 1.0 and metrics["reward/unscored"].mean == 1.0


def test_the_baseline_is_the_groups_and_all_members_are_kept():
    """G3"""
    np.testing.assert_allclose(advantages_of([1.0, 0.0, 0.0, 0.0]), [0.75, -0.25, -0.25, -0.25])
    group = group_of([sample_of([5, 6], [7 + i, 8]) for i in range(4)], [1.0, 0.0, 0.0, 0.0])
    config = TrainingConfig()
    ((batch,),) = make_batches([group], group_advantages([group], config.advantage), config, max_length=8)
    assert len(batch.sample_ids) == 4 and batch.counts.sequences == 4


def test_the_baseline_is_over_attempts_not_over_their_segments():
    """G4"""
    one, three = sample_of([5], [7]), [sample_of([5, 6], [7]), sample_of([5, 7], [8]), sample_of([5, 8], [9])]
    group = group_of([one, three], [0.0, 1.0])
    (found,) = group_advantages([group], AdvantageConfig(kind="dr_grpo"))
    assert found.tolist() == [-0.5, 0.5]
    ((batch,),) = make_batches([group], [found], TrainingConfig(), max_length=8)
    assert batch.advantages.tolist() == [-0.5, 0.5, 0.5, 0.5]


def test_a_group_of_one_has_no_advantage_and_says_so(caplog):
    """G5"""
    with caplog.at_level(logging.WARNING):
        assert advantages_of([3.0], "grpo").tolist() == [0.0]
    assert "1 scored episodes" in caplog.text
    assert batch_metrics([group_of([sample_of([5], [7])], [3.0])])["group/too_small"].mean == 1


def test_failed_attempts_are_counted_and_nothing_is_nan():
    """G6"""
    group = group_of([sample_of([5, 6], [7, 8])] * 4, [None, None, 1.0, None])
    (found,) = group_advantages([group], AdvantageConfig())
    assert found[2] == 0 and np.isnan(found).sum() == 3
    config = TrainingConfig()
    assert make_batches([group], [found], config, max_length=8) == []
    metrics = batch_metrics([group], [found], config)
    assert metrics["reward/unscored"].mean == 3 and metrics["batch/empty"].mean == 1
    assert all(math.isfinite(stat.mean) for stat in metrics.values())


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 0.36788, 0.63212)]
)
def test_kl_pulls_towards_the_reference(estimator, value, slope):
    """K1: log-probability -1, reference -2. Descending lowers the log-probability, towards the reference."""
    logprob = torch.tensor([-1.0], requires_grad=True)
    kl = kl_terms(logprob, torch.tensor([-2.0]), estimator)
    kl.sum().backward()
    assert float(kl) == pytest.approx(value, abs=1e-5)
    assert float(logprob.grad) == pytest.approx(slope, abs=1e-5)
    other = torch.tensor([-1.0], requires_grad=True)
    kl_terms(other, torch.tensor([-0.5]), estimator).sum().backward()
    assert float(other.grad) < 0


def test_kl_counts_only_targets_in_the_loss():
    """K1: padding and masked samples do not enter."""
    config = TrainingConfig(loss=LossConfig(kl_coef=0.1, kl_estimator="k2"))
    inputs = inputs_of(
        [-1.0, -1.0],
        [-1.0, -1.0],
        [0.0, 0.0],
        config,
        samples=[0, 1],
        weights=[1.0, 0.0],
        reference_logprobs=[-2.0, -50.0],
    )
    out = loss_function(config)(inputs)
    assert float(out.loss) == pytest.approx(0.05)
    assert out.metrics["loss/kl"].mean == pytest.approx(0.5)
