"""Turns queries, keys and values of one forward pass into attention outputs, over keys and values kept in blocks.

A pass is a flat list of N rows. The rows of sequences that catch up (prefill) stand first, each sequence's together; one
row for each sequence that decodes stands after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(slots=True)
class Stretch:
    """Rows [start, stop) of one sequence that catches up. slots: [L] where all its L tokens so far are kept."""

    start: int
    stop: int
    slots: torch.Tensor


@dataclass
class Pass:
    """One forward pass.

    token_ids, positions: [N]
    slots: [N] where each row's keys and values are written
    stretches: sequences that catch up
    decode_start: first decoding row
    tables: [D, L] where the tokens of each decoding sequence are kept, padded
    lengths: [D] how many of them count
    logit_rows: [R] rows whose logits are wanted
    one_by_one: attend each sequence in shapes that depend on itself alone
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    stretches: list[Stretch]
    decode_start: int
    tables: torch.Tensor | None
    lengths: torch.Tensor | None
    logit_rows: torch.Tensor
    one_by_one: bool = False
    routes: np.ndarray | None = None
    """[R, layers, top_k] experts of the rows whose logits are wanted, once a model that has them was run."""
    older: list[tuple[int, int, Any]] = field(default_factory=list)
    """Rows [start, stop) that run under an older adapter, the last of the pass, and that adapter."""
    _biases: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def row_slots(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which slots each row looks at, with no regard to what kind of row it is.

        starts, counts: [N] a row's part of the third, which holds all rows' slots
        """
        flat = [stretch.slots for stretch in self.stretches]
        starts, counts, at = [], [], 0
        for stretch in self.stretches:
            rows, length = stretch.stop - stretch.start, stretch.slots.numel()
            starts.append(torch.full((rows,), at))
            counts.append(torch.arange(length - rows + 1, length + 1))
            at += length
        if self.tables is not None:
            decoding, width = self.tables.shape
            flat.append(self.tables.flatten())
            starts.append(torch.arange(at, at + decoding * width, width))
            counts.append(self.lengths)
        return torch.cat(starts), torch.cat(counts), torch.cat(flat)

    def decode_bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[D, 1, 1, L] 0 where a decoding row may look, -inf elsewhere."""
        key = window or 0
        if key not in self._biases:
            places = torch.arange(self.tables.shape[1])[None, :]
            seen = places < self.lengths[:, None]
            if window:
                seen &= places >= self.lengths[:, None] - window
            bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
            self._biases[key] = bias[:, None, None, :]
        return self._biases[key]


class KeyValues:
    """The store: for each layer two tensors [slots, kv_heads, head_dim], made when the layer first writes."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """slots: [N]; keys, values: [N, kv_heads, head_dim]"""
        kept_keys, kept_values = self.of(layer, keys, values)
        kept_keys.index_copy_(0, slots, keys)
        kept_values.index_copy_(0, slots, values)

    def of(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's two tensors. keys, values: [N, kv_heads, head_dim], like which they are made; values None: like keys"""
        if layer not in self.keys:
            # Not cleared: a slot is read only after it was written, and untouched memory costs nothing.
            values = keys if values is None else values
            self.values[layer] = values.new_empty(self.slots, *values.shape[1:])
            self.keys[layer] = keys.new_empty(self.slots, *keys.shape[1:])
        return self.keys[layer], self.values[layer]

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """[N] slots to as many others."""
        for store in (self.keys, self.values):
            for layer in store.values():
                layer.index_copy_(0, targets, layer.index_select(0, sources))

    def read(self, slots: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Layer -> copies of keys and values at some slots."""
        return {layer: (keys[slots], self.values[layer][slots]) for layer, keys in self.keys.items()}

    def drop(self) -> None:
        self.keys.clear()
        self.values.clear()


def attend(
    layer: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    store: KeyValues,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query [N, heads, D], keys and values [N, kv_heads, D] into [N, heads, D]; keys and values are written first."""
    store.write(layer, batch.slots, keys, values)
    # Padding rows are attended by nobody and attend to nothing.
    out = query.new_zeros(query.shape) if batch.one_by_one else query.new_empty(query.shape)
    kept = store.keys[layer], store.values[layer]
    for stretch in batch.stretches:
        part = slice(stretch.start, stretch.stop)
        out[part] = attend_stretch(query[part], *kept, stretch.slots, scaling, window, softcap)
    part = slice(batch.decode_start, None)
    if batch.tables is not None and batch.one_by_one:
        _one_by_one(out[part], query[part], *kept, batch, scaling, window, softcap)
    elif batch.tables is not None:
        out[part] = _scattered(query[part], *kept, batch, scaling, window, softcap)
    return out


def attend_stretch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """[n, heads, D] of the last n of the tokens that lie at `slots`."""
    length, rows = slots.numel(), query.shape[0]
    bias = _causal_bias(rows, length, window, query.dtype) if rows < length or window or softcap else None
    query, keys, values = (part.transpose(0, 1)[None] for part in (query, keys[slots], values[slots]))
    return _product(query, keys, values, bias, scaling, softcap)[0].transpose(0, 1)


def _scattered(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[D, heads, size] of the decoding rows, over copies of what their blocks hold, padded to the longest."""
    bias = batch.decode_bias(window, query.dtype)
    shape = (*batch.tables.shape, *keys.shape[1:])
    flat = batch.tables.reshape(-1)
    keys, values = (kept.index_select(0, flat).view(shape).transpose(1, 2) for kept in (keys, values))
    return _product(query[:, :, None], keys, values, bias, scaling, softcap)[:, :, 0]


def _one_by_one(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Into `out`, each decoding row in shapes that depend on its own sequence alone."""
    for row in range(batch.tables.shape[0]):
        length = int(batch.lengths[row])
        first = max(0, length - window) if window else 0
        slots = batch.tables[row, first:length]
        out[row] = _product(
            query[row][None, :, None],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            query.new_zeros(1, 1, 1, length - first),
            scaling,
            softcap,
        )[0, :, 0]


def _causal_bias(rows: int, length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[rows, length] of the last `rows` of `length` tokens: each looks at itself and what stands before it."""
    own = torch.arange(length - rows, length)[:, None]
    others = torch.arange(length)[None, :]
    seen = others <= own
    if window:
        seen &= others > own - window
    return torch.zeros(rows, length, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _product(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """[B, heads, n, D] over [B, kv_heads, L, D]; without a bias the n rows are all L, causal."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, is_causal=bias is None, scale=scaling, enable_gqa=True
        )
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    scores: Any = torch.matmul(query, keys.transpose(-1, -2)) * scaling
    scores = torch.tanh(scores / softcap) * softcap + bias
    return torch.matmul(scores.float().softmax(-1).to(query.dtype), values)
