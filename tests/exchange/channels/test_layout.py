"""Tensors into one run of bytes and back, whatever memory they stand in."""

from __future__ import annotations

import ctypes

import pytest
import torch

from headrace.exchange.channels import layout


def flat(sizes, step=16, dtype=torch.float32, seed=0):
    """Named views of one flat tensor, each `step` elements' border after the one before."""
    whole = torch.randn(sum(-(-n // step) * step for n in sizes) + step, generator=torch.Generator().manual_seed(seed))
    whole = whole.to(dtype)
    named, start = [], 0
    for i, n in enumerate(sizes):
        named.append((f"w{i}", whole[start : start + n]))
        start += -(-n // step) * step
    return named


def filled(named):
    planned = layout.plan(named)
    memory = torch.zeros(planned.capacity, dtype=torch.uint8)
    layout.fill(memory, planned, named)
    found = layout.views(memory, planned)
    for name, tensor in named:
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def copies(monkeypatch):
    made = []

    def memmove(target, source, size):
        made.append(size)
        return ctypes_memmove(target, source, size)

    ctypes_memmove = ctypes.memmove
    monkeypatch.setattr(layout.ctypes, "memmove", memmove)
    return made


def test_views_of_one_flat_tensor_go_in_one_copy(copies):
    filled(flat([100, 16, 1, 33]))
    assert len(copies) == 1


@pytest.mark.parametrize(
    "named",
    [
        flat([100, 16, 1, 33])[::-1],
        flat([100, 16, 1, 33], step=1),
        [*flat([10, 20]), *[(f"x{name}", t) for name, t in flat([10, 20], seed=1)]],
        [(f"b{name}", t) for name, t in flat([7, 9], step=32, dtype=torch.bfloat16)],
        [("a", torch.randn(4, 6).t()), ("empty", torch.empty(0, 3)), ("one", torch.tensor(3.0)), ("b", torch.randn(5))],
        [(f"twice{i}", t) for i, t in enumerate([torch.arange(40.0)] * 2)],
        [],
    ],
    ids=[
        "turned round",
        "no borders",
        "two storages",
        "bfloat16",
        "transposed, empty, scalar",
        "one tensor twice",
        "none",
    ],
)
def test_every_tensor_arrives_whatever_it_is_a_view_of(named):
    filled(named)
