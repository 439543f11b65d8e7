"""Turns a packed batch into what a Hugging Face causal LM needs to run it: attention along a tree of segments."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.types import Array, TokenBatch

ATTENTION_NAME = "headrace_tree"
WHOLE_TREE_TOKENS = 512
"""Up to here one small attention over a subtree is cheaper than one for each segment."""
MAX_SCORES = 1 << 24
"""Most query-key pairs in one block of scores (64 MB a head in float32)."""
PADDING_SLACK = 1.3
"""Blocks are batched while padding keeps the scores below this many times what they need."""


@dataclass(slots=True)
class _Bucket:
    """b blocks of attention, padded to Q queries and K keys each.

    query_rows [b*Q], key_rows [b*K]: input rows; query_positions [b, Q], key_positions [b, K]
    allowed: [b, Q, K], None for one plain causal sequence
    """

    query_rows: Tensor
    key_rows: Tensor
    allowed: Tensor | None
    query_positions: Tensor
    key_positions: Tensor
    shape: tuple[int, int, int]
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[b, 1, Q, K] added to the scores. A window counts positions, so it is the one of the unpacked sequence."""
        if (window, dtype) not in self.masks:
            allowed = self.allowed
            if allowed is None:
                allowed = self.key_positions[:, None, :] <= self.query_positions[:, :, None]
            if window is not None:
                near = self.key_positions[:, None, :] > self.query_positions[:, :, None] - window
                allowed = allowed & near
            mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self.masks[window, dtype] = mask.masked_fill_(~allowed, float("-inf")).unsqueeze(1)
        return self.masks[window, dtype]


@dataclass(slots=True)
class TreeAttention:
    """The attention of one packed batch: buckets of blocks, and where each input row's result stands among them."""

    buckets: list[_Bucket]
    places: Tensor


@dataclass(slots=True)
class _Block:
    queries: Array
    keys: Array
    query_segments: Array
    key_segments: Array

    @property
    def scores(self) -> int:
        return len(self.queries) * len(self.keys)


def tree_attention(batch: TokenBatch, device: torch.device | str = "cpu") -> TreeAttention:
    """Cut the batch into blocks of queries and keys: a small subtree is one block, and so is each segment above it."""
    segments = np.asarray(batch.segment_ids)
    parents = np.asarray(batch.segment_parents).tolist()
    starts = np.searchsorted(segments, np.arange(len(parents)), side="left")
    ends = np.searchsorted(segments, np.arange(len(parents)), side="right")
    ancestors: list[list[int]] = []
    subtree = (ends - starts).tolist()
    for segment, parent in enumerate(parents):
        ancestors.append([*ancestors[parent], segment] if parent >= 0 else [segment])
    for segment in reversed(range(len(parents))):
        if parents[segment] >= 0:
            subtree[parents[segment]] += subtree[segment]
    members: dict[int, list[int]] = {}
    block_of: list[int] = []
    for segment, parent in enumerate(parents):
        joins = parent >= 0 and subtree[parent] <= WHOLE_TREE_TOKENS
        block_of.append(block_of[parent] if joins else segment)
        members.setdefault(block_of[-1], []).append(segment)

    def rows(of: list[int]) -> Array:
        return np.concatenate([np.arange(starts[s], ends[s]) for s in of])

    blocks = []
    for top, inside in members.items():
        own, keys = rows(inside), rows([*ancestors[top][:-1], *inside])
        if len(own):
            blocks.append(_Block(own, keys, segments[own], segments[keys]))
    visible = np.zeros((len(parents), len(parents)), dtype=bool) if len(parents) <= 4096 else None
    if visible is not None:
        for segment, line in enumerate(ancestors):
            visible[segment, line] = True
    positions = np.asarray(batch.position_ids)
    buckets, places, offset = [], np.empty(len(segments), dtype=np.int64), 0
    for group in _pack_blocks(blocks):
        bucket = _bucket(group, positions, ancestors, visible, device)
        for i, block in enumerate(group):
            places[block.queries] = offset + i * bucket.shape[1] + np.arange(len(block.queries))
        offset += bucket.shape[0] * bucket.shape[1]
        buckets.append(bucket)
    return TreeAttention(buckets, torch.from_numpy(places).to(device))


def _pack_blocks(blocks: list[_Block]) -> list[list[_Block]]:
    """Blocks of like size together."""
    packs: list[list[_Block]] = []
    for block in sorted(blocks, key=lambda b: (len(b.keys), len(b.queries)), reverse=True):
        if packs:
            pack = packs[-1]
            queries = max(len(block.queries), max(len(b.queries) for b in pack))
            padded = queries * len(pack[0].keys) * (len(pack) + 1)
            needed = sum(b.scores for b in pack) + block.scores
            if padded <= MAX_SCORES and padded <= PADDING_SLACK * needed:
                pack.append(block)
                continue
        packs.append([block])
    return packs


def _bucket(
    blocks: list[_Block],
    positions: Array,
    ancestors: list[list[int]],
    visible: Array | None,
    device: torch.device | str,
) -> _Bucket:
    b, q, k = len(blocks), max(len(x.queries) for x in blocks), max(len(x.keys) for x in blocks)
    to = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
    first = blocks[0]
    if b == 1 and len(set(first.key_segments.tolist())) == 1 and q == k:
        rows, at = to(first.queries), to(positions[first.queries][None])
        return _Bucket(rows, rows, None, at, at, (1, q, k))
    queries, keys = np.zeros((b, q), dtype=np.int64), np.zeros((b, k), dtype=np.int64)
    allowed = np.zeros((b, q, k), dtype=bool)
    for i, block in enumerate(blocks):
        n, m = len(block.queries), len(block.keys)
        queries[i, :n], keys[i, :m] = block.queries, block.keys
        if visible is not None:
            seen = visible[block.query_segments[:, None], block.key_segments[None, :]]
        else:
            seen = np.array([np.isin(block.key_segments, ancestors[s]) for s in block.query_segments])
        allowed[i, :n, :m] = seen & (block.keys[None, :] <= block.queries[:, None])
        # A padded query must see something, or its softmax is 0/0; its result is never read.
        queries[i, n:] = block.queries[0]
        allowed[i, n:, 0] = True
    key_positions = positions[keys]
    query_positions = positions[queries].copy()
    for i, block in enumerate(blocks):
        query_positions[i, len(block.queries) :] = key_positions[i, 0]
    return _Bucket(
        to(queries.reshape(-1)), to(keys.reshape(-1)), to(allowed), to(query_positions), to(key_positions), (b, q, k)
    )


def attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    tree: TreeAttention | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention function for `AttentionInterface`: q [1, H, N, D], k and v [1, Hkv, N, D] -> [1, N, H, D]."""
    if tree is None or query.shape[0] != 1:
        raise ValueError(f"{ATTENTION_NAME} runs packed batches only: pass tree=tree_attention(batch) to the model")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for bucket in tree.buckets:
        b, n_queries, n_keys = bucket.shape
        q = _gather(query, bucket.query_rows, b, n_queries, query.shape[1])
        k = _gather(key, bucket.key_rows, b, n_keys, query.shape[1])
        v = _gather(value, bucket.key_rows, b, n_keys, query.shape[1])
        if bucket.allowed is None and sliding_window is None and softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        elif softcap is None:
            mask = bucket.mask(sliding_window, q.dtype)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            mask = bucket.mask(sliding_window, q.dtype)
            scores = softcap * torch.tanh(q @ k.transpose(2, 3) * (scaling / softcap)) + mask
            out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
        outputs.append(out.transpose(1, 2).reshape(b * n_queries, query.shape[1], -1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, tree.places).unsqueeze(0), None


def _gather(states: Tensor, rows: Tensor, b: int, length: int, heads: int) -> Tensor:
    """[1, h, N, D] -> [b, heads, length, D], key and value heads repeated for the query heads that share them."""
    picked = states[0].index_select(1, rows).view(states.shape[1], b, length, -1).transpose(0, 1)
    repeat = heads // states.shape[1]
    if repeat == 1:
        return picked
    return picked[:, :, None].expand(-1, -1, repeat, -1, -1).reshape(b, heads, length, -1)


def register() -> None:
    """Make the attention known to transformers. It gets no mask from there: the tree holds its own."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
