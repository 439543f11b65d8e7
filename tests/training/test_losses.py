"""Losses, corrections and their metrics against hand-computed numbers."""

import math

import msgspec
import pytest
import torch

from headrace.errors import ConfigError
from headrace.training.config import TrainingConfig
from headrace.training.corrections import correct, interpolate_proximal
from headrace.training.losses import LossInputs, LossOutputs, effective_sample_share, loss_function
from headrace.types import BatchCounts, Stat


def config_of(**tables):
    return msgspec.convert(tables, TrainingConfig)


def inputs_of(logprobs, behavior, advantages, config, samples=None, versions=None, weights=None, **more):
    logprobs = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    m = len(logprobs)
    samples = torch.tensor(samples or [0] * m)
    weights = torch.tensor(weights or [1.0] * (int(samples.max()) + 1))
    counted = [i for i in range(m) if weights[samples[i]]]
    more = {k: torch.tensor(v, dtype=torch.float32) for k, v in more.items()}
    return LossInputs(
        logprobs=logprobs,
        behavior_logprobs=torch.tensor(behavior, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        samples=samples,
        sample_weights=weights,
        versions=torch.tensor(versions or [0] * m),
        counts=BatchCounts(tokens=len(counted), sequences=int(weights.sum()), groups=1, max_length=10),
        config=config,
        **more,
    )


def run(inputs):
    out = loss_function(inputs.config)(inputs)
    out.loss.backward()
    return out, inputs.logprobs.grad


def test_clipping_by_hand():
    # ratios 1.5, 1.5, 0.5, 0.5 with advantages +, -, +, -; bounds 0.8 and 1.28
    logs = [math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)]
    out, grad = run(inputs_of(logs, [0.0] * 4, [1.0, -1.0, 1.0, -1.0], config_of()))
    assert float(out.loss) == pytest.approx((-1.28 + 1.5 - 0.5 + 0.8) / 4, rel=1e-5)
    assert grad.tolist() == pytest.approx([0, 1.5 / 4, -0.5 / 4, 0], abs=1e-6)
    assert out.metrics["loss/clip_share"].mean == 0.5
    assert out.metrics["loss/clip_high_share"].mean == out.metrics["loss/clip_low_share"].mean == 0.25
    assert out.metrics["loss/ratio_max"].maximum == pytest.approx(1.5)


def test_reinforce_gradient_is_minus_the_advantage():
    out, grad = run(inputs_of([-1.0, -2.0], [-3.0, -3.0], [2.0, -1.0], config_of(loss={"kind": "reinforce"})))
    assert grad.tolist() == [-1.0, 0.5]
    assert out.metrics["loss/clip_share"].mean == 0


def test_trainer_ratio_is_taken_against_the_proximal_policy():
    config = config_of(loss={"old_logprobs": "trainer"})
    out, _ = run(inputs_of([-1.0], [-9.0], [1.0], config, proximal_logprobs=[-1.1]))
    assert out.metrics["loss/ratio_max"].maximum == pytest.approx(math.exp(0.1), rel=1e-5)
    out, grad = run(inputs_of([-1.0], [-9.0], [1.0], config))
    assert out.metrics["loss/ratio_max"].maximum == 1 and grad.tolist() == [-1.0]


def test_truncated_token_weights_multiply_the_loss():
    config = config_of(loss={"old_logprobs": "trainer"}, correction={"kind": "truncate", "high": 2.0})
    log3, log_half = math.log(3), math.log(0.5)
    out, grad = run(inputs_of([log3, log_half], [0.0, 0.0], [1.0, 1.0], config, proximal_logprobs=[log3, log_half]))
    assert grad.tolist() == pytest.approx([-2.0 / 2, -0.5 / 2])
    assert out.metrics["correction/weight_mean"].mean == pytest.approx(1.25)
    assert out.metrics["correction/ess"].mean == pytest.approx(2.5**2 / (2 * (4 + 0.25)))


def test_a_band_leaves_tokens_out_of_the_loss():
    config = config_of(loss={"old_logprobs": "trainer"}, correction={"kind": "mask", "low": 0.5, "high": 2.0})
    logs = [math.log(3), 0.0, math.log(0.4)]
    out, grad = run(inputs_of(logs, [0.0] * 3, [1.0] * 3, config, proximal_logprobs=logs))
    assert grad.tolist() == pytest.approx([0, -1 / 3, 0])
    assert out.metrics["correction/masked_share"].mean == pytest.approx(2 / 3)


@pytest.mark.parametrize("level, expected", [("token", [4, 1, 5]), ("sequence", [4, 4, 5]), ("geometric", [2, 2, 5])])
def test_weights_are_of_the_token_of_its_sequence_or_of_the_geometric_mean(level, expected):
    logs = torch.tensor([math.log(4), math.log(1), math.log(9)])
    samples = torch.tensor([0, 0, 1])
    found = correct(logs, samples, 2, config_of(correction={"kind": "truncate", "level": level, "high": 5}).correction)
    assert found.weights.tolist() == pytest.approx(expected)


def test_a_band_on_the_geometric_mean_keeps_or_drops_whole_samples():
    logs = torch.tensor([math.log(4), math.log(1), math.log(9), math.log(1 / 9)])
    samples = torch.tensor([0, 0, 1, 1])
    config = config_of(correction={"kind": "mask", "level": "geometric", "low": 0.9, "high": 1.9}).correction
    assert correct(logs, samples, 2, config).keep.tolist() == [False, False, True, True]


def test_an_interpolated_proximal_policy_lies_between_behaviour_and_current_by_age():
    current, behavior = torch.tensor([-1.0] * 4), torch.tensor([float("nan"), -2.0, -2.0, -2.0])
    found = interpolate_proximal(current, behavior, torch.tensor([0, 1, 2, 4]))
    assert found.tolist() == pytest.approx([-1.0, -2.0, -1.5, -1.25])


def test_the_interpolated_ratio_and_its_weight():
    """lag 2: half way in log space, so ratio = exp((current - behaviour) / 2), and the weight is the other half."""
    config = config_of(loss={"old_logprobs": "interpolated"}, correction={"kind": "truncate", "high": 9.0})
    out, _ = run(inputs_of([-1.0], [-1.2], [1.0], config, lags=[2]))
    assert out.metrics["loss/ratio_max"].maximum == pytest.approx(math.exp(0.1), rel=1e-5)
    assert out.metrics["correction/weight_mean"].mean == pytest.approx(math.exp(0.1), rel=1e-5)
    assert float(out.loss) == pytest.approx(-math.exp(0.2), rel=1e-5)


def test_the_effective_share_of_the_correction_alone():
    config = config_of(loss={"old_logprobs": "trainer"}, correction={"kind": "mask", "low": 0.5, "high": 2.0})
    logs = [math.log(3), 0.0, 0.0, 0.0]
    out, _ = run(inputs_of(logs, [0.0] * 4, [1.0] * 4, config, proximal_logprobs=logs))
    assert out.metrics["correction/weight_ess"].mean == pytest.approx(0.75)


def test_an_engine_ratio_is_not_weighted_twice():
    """With old_logprobs = engine the ratio holds the weight: truncating bounds the product, masking only masks."""
    log4 = math.log(4)
    config = config_of(correction={"kind": "truncate", "high": 2.0})
    out, _ = run(inputs_of([log4, 0.0], [0.0, 0.0], [-1.0, -1.0], config))
    assert float(out.loss) == pytest.approx((2 + 1) / 2)
    config = config_of(correction={"kind": "mask", "high": 2.0})
    out, _ = run(inputs_of([log4, 0.5], [0.0, 0.0], [-1.0, -1.0], config))
    assert float(out.loss) == pytest.approx(math.exp(0.5) / 2)


def test_effective_sample_share():
    assert effective_sample_share(torch.tensor([1.0, 1.0, 1.0])) == pytest.approx(1)
    assert effective_sample_share(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_share(torch.zeros(3)) == 1 and effective_sample_share(torch.zeros(0)) == 1


def test_mismatch_is_told_apart_by_versions():
    out, _ = run(
        inputs_of([-1.0, -1.0, -1.0], [-1.1, -1.0, -1.5], [1.0] * 3, config_of(), samples=[0, 1, 1], versions=[4, 4, 5])
    )
    metrics = out.metrics
    assert metrics["mismatch/logprob_diff_mean"].mean == pytest.approx(0.1, rel=1e-4)
    assert metrics["mismatch/mixed/logprob_diff_mean"].mean == pytest.approx(0.25, rel=1e-4)
    assert metrics["mismatch/mixed/logprob_diff_max"].maximum == pytest.approx(0.5, rel=1e-4)
    assert metrics["mismatch/mixed/k3"].mean == pytest.approx((math.exp(0.5) - 1.5) / 2, rel=1e-3)
    assert metrics["mismatch/mixed_share"].mean == pytest.approx(2 / 3)


def test_a_sample_out_of_the_loss_stays_out_whatever_its_numbers():
    inputs = inputs_of(
        [-1.0, -1.0], [-1.0, float("-inf")], [1.0, float("nan")], config_of(), samples=[0, 1], weights=[1.0, 0.0]
    )
    out, grad = run(inputs)
    assert float(out.loss) == -1.0 and grad[0] == -1.0 and math.isfinite(grad[1]) and grad[1] == 0


def test_huge_log_ratios_stay_finite():
    out, grad = run(inputs_of([0.0, -90.0], [-90.0, 0.0], [-1.0, 1.0], config_of()))
    assert math.isfinite(float(out.loss)) and torch.isfinite(grad).all()


def constant_loss(inputs):
    return LossOutputs(inputs.logprobs.sum() * 3, {"loss/mine": Stat(1.0)})


def test_a_loss_of_the_user_is_imported_by_path():
    _, grad = run(inputs_of([-1.0], [-1.0], [1.0], config_of(loss={"function": f"{__name__}:constant_loss"})))
    assert grad.tolist() == [3.0]
    with pytest.raises(ConfigError, match="found 'clippd'; valid: clipped"):
        loss_function(config_of(loss={"function": "clippd"}))
