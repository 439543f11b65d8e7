"""Turns a weight matrix into a product that runs from a packed copy of it where that is faster."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

_WORTH_PACKING = 1 << 18
"""Elements from which a packed product wins; smaller matrices stay in cache anyway."""
_TYPICAL_ROWS = 64


@cache
def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed linear (a private operator) and it computes what it should."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.linspace(-1, 1, 24 * 16).view(24, 16)
    x = torch.linspace(-2, 2, 3 * 16).view(3, 16)
    try:
        return torch.allclose(_packed_product(x, _pack(weight), None), F.linear(x, weight), atol=1e-5)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return False


class Linear:
    """[N, in] into [N, out]. The packed copy serves two rows and more; a single row is faster from the plain weight."""

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, pack: bool = True) -> None:
        self.weight, self.bias = weight, bias
        wanted = pack and weight.dtype == torch.float32 and weight.numel() >= _WORTH_PACKING and can_pack()
        self.packed = _pack(weight) if wanted else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None or x.shape[0] < 2:
            return F.linear(x, self.weight, self.bias)
        return _packed_product(x, self.packed, self.bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)


def _packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
