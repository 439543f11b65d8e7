"""Gradients that are added where they stand, against those that autograd makes."""

import copy

import pytest
import torch
from torch import nn

from headrace.training.optimizer import FlatParameters
from headrace.training.policy import add_in_place


class Small(nn.Module):
    """An embedding with a padding row, a tied head, one weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=3)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, ids):
        hidden = self.frozen(self.down(torch.tanh(self.up(self.embed(ids)))))
        return torch.sin(hidden @ self.embed.weight.t()).sum()


@pytest.fixture
def models():
    torch.manual_seed(0)
    plain = Small()
    return plain, copy.deepcopy(plain)


IDS = [torch.tensor([[3, 1, 7, 7], [0, 3, 49, 1]]), torch.tensor([[5, 5, 1, 2]])]


def test_in_place_gradients_are_those_of_autograd_over_several_passes(models):
    plain, in_place = models
    flat = FlatParameters(in_place)
    add_in_place(in_place)
    for ids in IDS:
        plain(ids).backward()
        in_place(ids).backward()
    for (name, want), got in zip(plain.named_parameters(), in_place.parameters(), strict=True):
        if want.requires_grad:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-5, msg=name)
            assert got.grad.untyped_storage().data_ptr() == flat.grads.untyped_storage().data_ptr(), name
        else:
            assert got.grad is None
    assert (in_place.embed.weight.grad[3] != 0).any(), "the tied head trains the padding row, the look-up does not"


def test_without_a_gradient_to_add_to_autograd_makes_one(models):
    plain, in_place = models
    add_in_place(in_place)
    for model in models:
        model(IDS[0]).backward()
    torch.testing.assert_close(in_place.up.weight.grad, plain.up.weight.grad)
    torch.testing.assert_close(in_place.embed.weight.grad, plain.embed.weight.grad)


def test_no_weight_gets_a_gradient_tensor_of_its_own(models, monkeypatch):
    """What is saved: a tensor of the weight's size for each layer and pass."""
    _, in_place = models
    FlatParameters(in_place)
    add_in_place(in_place)
    handed = []
    for layer in (in_place.up, in_place.down):
        layer.weight.register_hook(handed.append)
    in_place(IDS[0]).backward()
    assert handed == [None, None]
