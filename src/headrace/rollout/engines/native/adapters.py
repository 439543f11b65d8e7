"""Turns published adapters into low-rank products beside the base's own: x W^T + (x A^T) B^T, several versions in one pass.

The base is never written to, so a new version costs its own few bytes, and a pass may mix versions: the rows that run under
one adapter stand together, and each layer adds that adapter's part to them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headrace.errors import ModelError
from headrace.rollout.engines.native.attention import KeyValues, Pass
from headrace.rollout.engines.native.generic import GenericWeights
from headrace.rollout.engines.native.llama import LlamaWeights
from headrace.rollout.engines.sequences import Sequence

_FUSED = {"qkv": "self_attn.q_proj", "out": "self_attn.o_proj", "gate_up": "mlp.gate_proj", "down": "mlp.down_proj"}
"""Products of a written-out layer, and the first of the published layers in each."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The adapter of one product. down: [R, in], up: [R, out], R the ranks of all published layers in it, one after another;
    parts: (published name, its part of R, its part of out)"""

    down: torch.Tensor
    up: torch.Tensor
    parts: tuple[tuple[str, slice, slice], ...]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x [n, in] through the adapter, added to y [n, out]."""
        y.addmm_(x @ self.down.t(), self.up)


Adapter = Mapping[str, Factors]
"""By product."""
Span = tuple[int, int, Adapter]
"""Rows [start, stop) of a pass, and what they run under."""


class Rows:
    """Which rows of the pass that is running go under which adapter."""

    def __init__(self) -> None:
        self._all: list[Span] = []
        self._last: list[Span] = []
        self._count = 0

    def begin(self, batch: Pass, live: Adapter) -> None:
        """Rows that the pass does not name run under the live adapter; they stand before the others."""
        self._count = batch.token_ids.numel()
        first = batch.older[0][0] if batch.older else self._count
        self._all = [
            (start, stop, adapter) for start, stop, adapter in [(0, first, live), *batch.older] if stop > start
        ]
        edges = torch.tensor([edge for start, stop, _ in self._all for edge in (start, stop)])
        places = torch.searchsorted(batch.logit_rows, edges).tolist()
        self._last = [
            (start, stop, adapter)
            for start, stop, (_, _, adapter) in zip(places[::2], places[1::2], self._all, strict=True)
        ]

    def add(self, product: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' part of a product. Late layers may run the rows alone whose logits are wanted."""
        x, y = x.flatten(0, -2), y.flatten(0, -2)
        spans = self._all if x.shape[0] == self._count else self._last
        if x.shape[0] < spans[-1][1]:
            raise ModelError(
                f"{product} runs {x.shape[0]} of {self._count} rows: its adapter cannot be told whose they are"
            )
        for start, stop, adapter in spans:
            if (factors := adapter.get(product)) is not None:
                factors.add(x[start:stop], y[start:stop])


class LlamaBase:
    """Written-out weights whose products pass through the adapters."""

    def __init__(self, weights: LlamaWeights) -> None:
        self.rows, self.dtype, self.error = Rows(), weights.shape.dtype, weights.error
        self.products: dict[str, tuple[int, list[tuple[str, int]]]] = {}
        """Product -> its input's width, and the published layers in it with their output's."""
        self._run = copy.copy(weights)
        self._run.layers = [self._layer(weights, index) for index in range(len(weights.layers))]

    def _layer(self, weights: LlamaWeights, index: int) -> Any:
        layer, changed = weights.layers[index], {}
        for field, first in _FUSED.items():
            product = f"model.layers.{index}.{first}"
            inside = [(name.removesuffix(".weight"), rows) for name, rows in weights.parts[f"{product}.weight"]]
            self.products[product] = weights.memory[f"{product}.weight"].shape[1], inside
            changed[field] = _Product(getattr(layer, field), product, self.rows)
        return replace(layer, **changed)

    def forward(self, batch: Pass, store: KeyValues) -> torch.Tensor:
        return self._run.forward(batch, store)


@dataclass(slots=True)
class _Product:
    base: Any
    name: str
    rows: Rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        self.rows.add(self.name, x, y)
        return y


class GenericBase:
    """A library's model whose linear layers pass through the adapters."""

    def __init__(self, weights: GenericWeights) -> None:
        self.rows, self.dtype, self.error = Rows(), weights.model.dtype, weights.error
        self._weights = weights
        head = weights.model.get_output_embeddings()
        layers = weights.model.named_modules()
        self._linears = {name: one for name, one in layers if isinstance(one, nn.Linear) and one is not head}
        self.products = {name: (one.in_features, [(name, one.out_features)]) for name, one in self._linears.items()}
        self._hooked = False

    def forward(self, batch: Pass, store: KeyValues) -> torch.Tensor:
        if not self._hooked:  # here, between two passes: an adapter is read while one runs
            for name, layer in self._linears.items():
                layer.register_forward_hook(lambda _, inputs, y, name=name: self.rows.add(name, inputs[0], y))
            self._hooked = True
        return self._weights.forward(batch, store)


class AdaptedWeights:
    """The base and one version of its adapter. Many versions share the base."""

    def __init__(self, base: LlamaBase | GenericBase, adapter: Adapter) -> None:
        self.base, self.adapter = base, adapter
        self.error = base.error

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as they were published."""
        for factors in self.adapter.values():
            for name, rank, out in factors.parts:
                yield f"{name}.lora_A", factors.down[rank]
                yield f"{name}.lora_B", factors.up[rank, out].t()

    def forward(self, batch: Pass, store: KeyValues) -> torch.Tensor:
        """[R, V] logits of the rows that the pass asks for."""
        self.base.rows.begin(batch, self.adapter)
        return self.base.forward(batch, store)


Base = LlamaBase | GenericBase


def newest_first(sequence: Sequence) -> float:
    """Key that sorts sequences by the version that they run under, those of the live weights first."""
    return -sequence.under[0] if sequence.under is not None else -math.inf


def older_rows(decoding: Iterable[Sequence], start: int) -> list[Span]:
    """Rows from `start` on, one for each sequence, newest first: those of each older adapter."""
    spans: list[Span] = []
    for row, sequence in enumerate(decoding, start):
        if sequence.under is None:
            continue
        adapter = sequence.under[1].adapter
        if spans and spans[-1][2] is adapter:
            spans[-1] = (spans[-1][0], row + 1, adapter)
        else:
            spans.append((row, row + 1, adapter))
    return spans


def base_of(weights: LlamaWeights | GenericWeights) -> Base:
    return LlamaBase(weights) if isinstance(weights, LlamaWeights) else GenericBase(weights)


def read_adapter(tensors: Mapping[str, torch.Tensor], base: Base) -> Adapter:
    """Published factors (`LAYER.lora_A` [rank, in], `LAYER.lora_B` [out, rank]) into those of the base's products."""
    adapter, used = {}, set()
    for product, (width, layers) in base.products.items():
        found = [name for name, _ in layers if f"{name}.lora_A" in tensors and f"{name}.lora_B" in tensors]
        if not found:
            continue
        used.update(f"{name}.lora_{factor}" for name in found for factor in "AB")
        adapter[product] = _fuse(tensors, width, layers, found, base.dtype)
    if unknown := sorted(set(tensors) - used):
        raise ModelError(f"the published adapter does not fit the model: it has no layer for {unknown[0]}")
    return adapter


def _fuse(
    tensors: Mapping[str, torch.Tensor],
    width: int,
    layers: list[tuple[str, int]],
    found: list[str],
    dtype: torch.dtype,
) -> Factors:
    """Side by side: outside its own rows and columns a layer's part of `up` is zero."""
    total = sum(tensors[f"{name}.lora_A"].shape[0] for name in found)
    down, up = torch.empty(total, width, dtype=dtype), torch.zeros(total, sum(rows for _, rows in layers), dtype=dtype)
    parts, at, column = [], 0, 0
    for name, rows in layers:
        if name in found:
            a, b = tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]
            rank = a.shape[0]
            if a.shape != (rank, width) or b.shape != (rows, rank):
                raise ModelError(
                    f"the published adapter does not fit the model: {name} has factors {tuple(a.shape)} and "
                    f"{tuple(b.shape)}, its weight is {(rows, width)}"
                )
            parts.append((name, slice(at, at + rank), slice(column, column + rows)))
            down[at : at + rank] = a
            up[at : at + rank, column : column + rows] = b.t()
            at += rank
        column += rows
    return Factors(down, up, tuple(parts))
