"""Turns the steps of a Llama-like model's pass, products included, into work for a team of threads: float32 on a processor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from headrace.cores import copy_beside, in_pieces
from headrace.pages import LargePages
from headrace.rollout.engines.native import kernels, tiles
from headrace.rollout.engines.native.linear import EVERY, Linear, relative_error, to_int8
from headrace.rollout.engines.native.team import Team
from headrace.vectors import BFLOAT16, FLOAT, INT8, PANEL

if TYPE_CHECKING:
    from headrace.rollout.engines.native.attention import KeyValues, Pass
    from headrace.rollout.engines.native.llama import Layer, LlamaShape

Place = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Memory of a shape and a type."""
_ROUNDED = {"bfloat16": BFLOAT16, "int8": INT8}
_TYPES = {FLOAT: torch.float32, BFLOAT16: torch.bfloat16, INT8: torch.int8}


def _rounded(weight: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """Weights [out, in] in one form, a scale for each output or None, and the relative error of a part of them."""
    if kind == FLOAT:
        return weight, None, 0.0
    source, scales = to_int8(weight) if kind == INT8 else (weight.to(_TYPES[kind]), None)
    some = source[::EVERY].float()
    return source, scales, relative_error(weight[::EVERY], some if scales is None else some * scales[::EVERY, None])


def _place(memory: torch.Tensor | None, pages: LargePages, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    """Where the copy lies: in `memory` if that is of its shape and type, else in `pages`."""
    fits = memory is not None and memory.shape == shape and memory.dtype == kind
    return memory if fits else pages.take(shape, kind)  # type: ignore[return-value]


class CompiledLinear(Linear, ABC):
    """From a copy in one of its forms. A row's result is the same to the bit whatever other rows there are."""

    __slots__ = ("_ends", "_numbers", "error", "outputs", "panels", "team")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        form: str,
        team: Team,
        memory: torch.Tensor | None,
        pages: LargePages,
    ) -> None:
        """weight: [out, in]; memory: for the copy, if it is of its shape and type, else it is in `pages`"""
        super().__init__(weight, bias)
        self.team, self.outputs = team, weight.shape[0]
        kind = _ROUNDED.get(form, FLOAT)
        source, scales, self.error = _rounded(weight, kind)
        self._copy(kind, source, scales, partial(_place, memory, pages))

    @abstractmethod
    def _copy(self, kind: int, source: torch.Tensor, scales: torch.Tensor | None, place: Place) -> None:
        """Lay the copy out. source: [out, in] in its form; scales: [out] of its outputs; place: memory for it"""


class PanelLinear(CompiledLinear):
    """In panels of columns, as they are or rounded, adding up in float32."""

    __slots__ = ()

    def _copy(self, kind: int, source: torch.Tensor, scales: torch.Tensor | None, place: Place) -> None:
        inputs = source.shape[1]
        whole, left = divmod(self.outputs, PANEL)
        self.panels = place((whole + (left > 0), inputs, PANEL), _TYPES[kind])
        copy_beside(self.panels[:whole], source[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2))
        if left:
            self.panels[whole].zero_()[:, :left].copy_(source[whole * PANEL :].t())
        self._ends = [None if one is None else F.pad(one, (0, -self.outputs % PANEL)) for one in (scales, self.bias)]
        optional = [0 if one is None else one.data_ptr() for one in self._ends]
        self._numbers = (*optional, inputs, kernels.product_for(kind).address)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, (scales, bias, inputs, step) = x.shape[0], self._numbers
        width = self.panels.shape[0] * PANEL
        out = self.team.room("product", rows, width)
        spans = kernels.product_spans(rows, inputs)
        stretches = kernels.product_stretches(width // PANEL, self.team.threads)
        self.team.run(
            step,
            spans * stretches,
            (
                x.data_ptr(), self.panels.data_ptr(), out.data_ptr(), scales, bias, rows, inputs, width, spans, stretches,
            ),
        )  # fmt: skip
        return out if width == self.outputs else out[:, : self.outputs].contiguous()


class TileLinear(CompiledLinear):
    """In tiles, by the processor's matrix unit: as near to the exact product as sums of float32, or nearer (`tiles` says when it
    is not)."""

    __slots__ = ()
    shapes = tiles.shapes()

    def _copy(self, kind: int, source: torch.Tensor, scales: torch.Tensor | None, place: Place) -> None:
        inputs = source.shape[1]
        lies = tiles.FORMS[kind]
        panels, depths = -(-self.outputs // tiles.COLUMNS), -(-inputs // lies.inputs)
        width, stretches = panels * tiles.COLUMNS, tiles.stretches_of(depths)
        self.panels = place((panels, depths, lies.right, tiles.TILE), torch.int8)
        added = torch.zeros(width) if self.bias is None else F.pad(self.bias, (0, width - self.outputs))
        by = torch.ones(panels, stretches, tiles.COLUMNS)
        if scales is not None:
            by.copy_(F.pad(scales, (0, width - self.outputs)).view(panels, 1, tiles.COLUMNS))
        self._ends = [by, added]

        def pack(first: int, last: int) -> None:
            some = source[first * tiles.COLUMNS : last * tiles.COLUMNS].contiguous()
            if kind == FLOAT:
                tiles.pack(some.data_ptr(), some.shape[0], inputs, self.panels[first].data_ptr(), by[first].data_ptr())
                return
            missing = (0, depths * lies.inputs - inputs, 0, (last - first) * tiles.COLUMNS - some.shape[0])
            some = F.pad(some, missing).view(torch.int8).view(last - first, tiles.COLUMNS, depths, tiles.WIDTH // 4, 4)
            self.panels[first:last].view(last - first, depths, tiles.WIDTH // 4, tiles.COLUMNS, 4).copy_(
                some.permute(0, 2, 3, 1, 4)
            )

        in_pieces(panels, source.numel(), pack)
        addresses = self.panels.data_ptr(), by.data_ptr(), added.data_ptr()
        self._numbers = addresses, inputs, width, depths * lies.left, stretches, tiles.product_for(kind).address

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, (addresses, inputs, width, deep, stretches, step) = x.shape[0], self._numbers
        out = self.team.room("product", rows, width)
        if not rows:
            return out[:, : self.outputs]
        blocks, splits = -(-rows // tiles.ROWS), kernels.spans_of(rows)
        spans, parts = tiles.spans_of(blocks), kernels.product_stretches(width // tiles.COLUMNS, self.team.threads)
        self.team.run(
            step,
            spans * parts + splits,
            (
                self.team.room("tiles", blocks * deep, tiles.TILE // 4).data_ptr(),
                self.team.room("scales", rows, stretches).data_ptr(), *addresses, out.data_ptr(), rows, inputs, width, blocks,
                spans, parts, self.shapes[-(-rows // blocks) - 1].ctypes.data, x.data_ptr(), splits,
            ),
        )  # fmt: skip
        return out if width == self.outputs else out[:, : self.outputs].contiguous()


class CompiledSteps:
    """`llama.TorchSteps` as loops of `kernels`, by one engine's team."""

    def __init__(self, size: int, shared: int, form: str = "packed") -> None:
        """size: of a head; shared: heads that have one key; form: of weights, whose product is compiled here, too"""
        self._team, self._attend = Team(), kernels.attend_for(size, shared).address
        self._linear = TileLinear if tiles.available() else PanelLinear
        (tiles if tiles.available() else kernels).product_for(_ROUNDED.get(form, FLOAT))

    def gathered(self, multiplications: int) -> AbstractContextManager[None]:
        return self._team.gathered(multiplications)

    def linear(
        self, form: str, weight: torch.Tensor, bias: torch.Tensor | None, memory: torch.Tensor | None, pages: LargePages
    ) -> Linear:
        return self._linear(weight, bias, form, self._team, memory, pages)

    def norm(self, x: torch.Tensor, due: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = self._team.room("norm", *x.shape)
        numbers = (x.data_ptr(), due.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[1], _bits(eps))
        self._team.by_rows(kernels.norm.address, x.shape[0], numbers)
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._team.room("gate", rows, width)
        self._team.by_rows(kernels.gate.address, rows, (gate_up.data_ptr(), out.data_ptr(), width))
        return out

    def mix(
        self, index: int, qkv: torch.Tensor, layer: Layer, s: LlamaShape, batch: Pass, store: KeyValues
    ) -> torch.Tensor:
        rows = qkv.shape[0]
        kept = qkv.view(rows, -1, s.head_dim)[:, s.heads : s.heads + s.kv_heads]
        keys, values = store.of(index, kept)
        norms = [0 if norm is None else norm.data_ptr() for norm in (layer.query_norm, layer.key_norm)]
        self._team.by_rows(
            kernels.place.address,
            rows,
            (
                qkv.data_ptr(), s.cos.data_ptr(), s.sin.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(), *norms,
                keys.data_ptr(), values.data_ptr(), s.heads, s.kv_heads, s.head_dim, _bits(s.eps),
            ),
        )  # fmt: skip
        starts, counts, slots = batch.row_slots
        out = qkv.new_zeros(rows, s.heads * s.head_dim)
        attending = counts.numel()  # padding stands last, and attends to nothing
        parts = kernels.attention_parts(attending, s.kv_heads, self._team.threads)
        self._team.run(
            self._attend,
            attending * parts,
            (
                qkv.data_ptr(), starts.data_ptr(), counts.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
                out.data_ptr(), _bits(s.head_dim**-0.5), s.kv_heads, parts,
            ),
        )  # fmt: skip
        return out


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
