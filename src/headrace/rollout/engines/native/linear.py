"""Turns a weight matrix into a product that runs from a copy of it in the form that is fastest, or smallest."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

_WORTH_PACKING = 1 << 18
"""Elements from which a packed product wins; smaller matrices stay in cache anyway."""
_TYPICAL_ROWS = 64
_FEW_ROWS = 8
"""Up to here a product waits for memory, and eight bits a weight are read fastest."""
EVERY = 16
"""One row in so many is looked at for the error of a rounded copy."""


class Linear:
    """[N, in] into [N, out], from the weight as it is.

    error: relative root mean square error of the weights that the product uses
    """

    __slots__ = ("bias", "weight")
    error = 0.0
    panels: torch.Tensor | None = None
    """The copy, where it lies in memory that the next version's may take."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """From a copy that is packed in the order in which products read it."""

    __slots__ = ("packed",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        wanted = weight.dtype == torch.float32 and weight.numel() >= _WORTH_PACKING and can_pack()
        self.packed = _pack(weight) if wanted else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return _packed_product(x, self.packed, self.bias)


class HalfLinear(Linear):
    """From a bfloat16 copy, adding up in float32. Faster where the processor has bfloat16 products."""

    __slots__ = ("error", "half")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.half = weight.bfloat16()
        self.error = relative_error(weight[::EVERY], self.half[::EVERY])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _with_bias(F.linear(x.bfloat16(), self.half), x, self.bias)


class Int8Linear(Linear):
    """From eight-bit integers and a scale for each output, symmetric, rounded to nearest; many rows at once from what
    they stand for in bfloat16."""

    __slots__ = ("error", "half", "integers", "scales")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.integers, scales = to_int8(weight)
        self.scales = scales.bfloat16()
        self.half = self.integers.bfloat16().mul_(self.scales[:, None])
        self.error = relative_error(weight[::EVERY], self.integers[::EVERY] * scales[::EVERY, None])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= _FEW_ROWS:
            product = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self.integers, self.scales)
        else:
            product = F.linear(x.bfloat16(), self.half)
        return _with_bias(product, x, self.bias)


FORMS: dict[str, type[Linear]] = {
    "plain": Linear,
    "packed": PackedLinear,
    "bfloat16": HalfLinear,
    "int8": Int8Linear,
}


def to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [out, in] and a scale for each output [out], which bfloat16 holds exactly."""
    scales = (weight.float().abs().amax(dim=1) / 127).bfloat16().clamp_(min=2.0**-120).float()
    return (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def relative_error(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact values."""
    exact = exact.float()
    size = exact.norm()
    return float((rounded.float() - exact).norm() / size) if size else 0.0


def _with_bias(product: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = product.to(x.dtype)
    return product if bias is None else product.add_(bias)


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


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)


def _packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
