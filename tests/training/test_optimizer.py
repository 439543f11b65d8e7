"""One flat AdamW against torch's own on separate parameters; schedule, clipping, bad gradients."""

import math

import pytest
import torch
from torch import nn

from headrace.training.config import OptimizerConfig
from headrace.training.optimizer import FlatAdamW, FlatParameters, learning_rate


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def backward(model, seed, scale=1.0):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    (model(x).square().sum() * scale).backward()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_flat_steps_are_those_of_separate_parameters(clip):
    torch.set_num_threads(1)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_norm=clip)
    mine, other = network(), network()
    flat = FlatParameters(mine)
    optimizer = FlatAdamW(flat, config, 10)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01, betas=config.betas, eps=config.eps, weight_decay=0.1)
    for seed in range(3):
        backward(mine, seed)
        backward(other, seed)
        if clip:
            right = float(nn.utils.clip_grad_norm_(other.parameters(), clip))
        else:
            right = float(nn.utils.get_total_norm([p.grad for p in other.parameters()]))
        plain.step()
        plain.zero_grad()
        norm, _, stepped = optimizer.step()
        assert stepped and norm == pytest.approx(right, rel=1e-5)
        assert (flat.grads == 0).all()
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_gradients_accumulate_in_the_flat_tensor():
    model = network()
    flat = FlatParameters(model)
    backward(model, 0)
    once = flat.grads.clone()
    backward(model, 0)
    assert once.abs().sum() > 0
    torch.testing.assert_close(flat.grads, 2 * once)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = network()
    flat = FlatParameters(model)
    optimizer = FlatAdamW(flat, OptimizerConfig(lr=0.01), 10)
    backward(model, 0)
    optimizer.step()
    before = flat.values.clone()
    moments = {name: t.clone() for name, t in optimizer.state().items()}
    backward(model, 1, bad)
    norm, _, stepped = optimizer.step()
    assert not stepped and not math.isfinite(norm)
    assert torch.equal(flat.values, before) and (flat.grads == 0).all()
    assert all(torch.equal(optimizer.state()[name], t) for name, t in moments.items())


def test_bfloat16_weights_move_by_less_than_their_own_precision():
    """lr 1e-4 is lost in a bfloat16 weight of 1; the float32 master keeps it until it shows."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    model.weight.data.fill_(1.0)
    flat = FlatParameters(model)
    optimizer = FlatAdamW(flat, OptimizerConfig(lr=1e-4, clip_norm=0), 100)
    for _ in range(60):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert float(flat.master[0]) == pytest.approx(1 - 60e-4, abs=1e-4)
    assert float(model.weight.detach()) < 1.0


@pytest.mark.parametrize(
    ("schedule", "right"),
    [("constant", [0.5, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.5, 0]), ("cosine", [0.5, 1, 1, 0.5, 0])],
)
def test_schedules_warm_up_and_end_at_the_total(schedule, right):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2)
    assert [learning_rate(config, i, 6) for i in (0, 1, 2, 4, 6)] == pytest.approx(right)
    assert learning_rate(config, 99, 6) == pytest.approx(right[-1])
