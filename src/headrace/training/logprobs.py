"""Turns hidden states into log-probabilities of given tokens, a chunk of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.types import Array, LogitShape, TokenBatch

CACHED_ROWS = 16
"""Rows of logits that are gone through together, all steps while they are in the processor's cache: 16 of 50,000 ids are 3 MB."""
OUTSIDE = -1e30
"""The logit of a token outside the support: finite, so that 0 probability times it is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """Which logits are needed: U rows for M targets. Siblings' first tokens share one row.

    input_rows: [U] row of the hidden states; temperatures: [U, 1], None when all are 1
    slots: [M] the logit row of each target; token_ids: [M]
    bounds: for each target in the order of slots, where the targets of row u start: [U+1]; order: [M] that order
    support_ids, support_offsets: row u may only draw support_ids[offsets[u]:offsets[u+1]], everything where that is empty
    shaping: what changes single logits before the temperature
    """

    input_rows: Tensor
    temperatures: Tensor | None
    slots: Tensor
    token_ids: Tensor
    order: Tensor
    bounds: tuple[int, ...]
    support_ids: Tensor | None = None
    support_offsets: tuple[int, ...] | None = None
    shaping: Shaping | None = None


@dataclass(frozen=True, slots=True)
class Shaping:
    """Repetition penalties and logit biases as the sampler applied them (`rollout.engines.sampling`), one entry for each
    logit that they touch: divided by its penalty where positive, multiplied where negative, then the bias is added.

    rows, ids, penalties, biases: [K] entries by row, each (row, id) once; offsets: [U+1] where the entries of row u start
    """

    rows: Tensor
    ids: Tensor
    penalties: Tensor
    biases: Tensor
    offsets: tuple[int, ...]

    def apply(self, logits: Tensor, start: int, end: int) -> _Slopes:
        """[end - start, V] logits of rows from `start` on, in place."""
        part = slice(self.offsets[start], self.offsets[end])
        at, penalties = (self.rows[part] - start, self.ids[part]), self.penalties[part]
        raw = logits[at]
        slopes = torch.where(raw > 0, 1.0 / penalties, penalties)
        logits[at] = raw * slopes + self.biases[part]
        return at, slopes


_Slopes = tuple[tuple[Tensor, Tensor], Tensor]
"""Entries (row, id) of a chunk of logits, and what their gradient is multiplied with."""


def logit_rows(batch: TokenBatch, device: torch.device | str = "cpu") -> LogitRows:
    """The logit rows of a batch: one for each input row, way of sampling and (when recorded) target's own support.

    Temperature 0 (greedy) counts as 1, as it does where the engine reports it.
    """
    temperatures = np.asarray(batch.temperatures, dtype=np.float32)[batch.target_samples]
    temperatures = np.where(temperatures == 0, np.float32(1), temperatures)
    rows = np.asarray(batch.target_rows, dtype=np.int64)
    mask = batch.sampling_mask
    own = np.arange(len(rows)) if mask is not None else np.zeros(len(rows), dtype=np.int64)
    shapes, kinds = shapes_of(batch)
    keys = np.stack([rows, temperatures.view(np.int32).astype(np.int64), own, kinds], axis=1)
    unique, first, slots = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    slots = slots.reshape(-1)
    order = np.argsort(slots, kind="stable")
    bounds = np.searchsorted(slots[order], np.arange(len(unique) + 1))
    support_ids = support_offsets = None
    if mask is not None:
        spans = [mask.token_ids[mask.offsets[m] : mask.offsets[m + 1]] for m in first]
        support_ids = torch.from_numpy(np.concatenate(spans).astype(np.int64) if spans else np.zeros(0, np.int64))
        support_ids = support_ids.to(device)
        support_offsets = tuple(np.concatenate([[0], np.cumsum([len(s) for s in spans])]).tolist())
    return LogitRows(
        input_rows=torch.from_numpy(np.ascontiguousarray(unique[:, 0])).to(device),
        temperatures=None if (temperatures == 1).all() else torch.from_numpy(temperatures[first]).to(device)[:, None],
        slots=torch.from_numpy(slots.astype(np.int64)).to(device),
        token_ids=torch.from_numpy(np.asarray(batch.target_ids, dtype=np.int64)).to(device),
        order=torch.from_numpy(order).to(device),
        bounds=tuple(bounds.tolist()),
        support_ids=support_ids,
        support_offsets=support_offsets,
        shaping=_shaping(batch, unique[:, 0], [shapes[kind] for kind in unique[:, 3]], device) if shapes else None,
    )


def shapes_of(batch: TokenBatch) -> tuple[list[LogitShape], Array]:
    """The different penalties and biases of a batch, none where nobody has any, and which of them [M] each target has."""
    if batch.logit_shapes is None:
        return [], np.zeros(len(batch.target_samples), dtype=np.int64)
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(batch.logit_shapes))}
    return list(numbers), np.array([numbers[shape] for shape in batch.logit_shapes])[batch.target_samples]


def _shaping(batch: TokenBatch, rows: Array, shapes: list[LogitShape], device: torch.device | str) -> Shaping:
    """rows: [U] input rows; shapes: the penalty and the biases of each. A penalty is for all that stands before its token."""
    tokens, segments = np.asarray(batch.token_ids), np.asarray(batch.segment_ids)
    starts = np.searchsorted(segments, np.arange(len(batch.segment_parents)))
    ends = np.append(starts[1:], len(segments))
    before: list[Array] = []
    for segment, parent in enumerate(np.asarray(batch.segment_parents).tolist()):
        above = before[parent] if parent >= 0 else tokens[:0]
        before.append(np.concatenate([above, tokens[starts[segment] : ends[segment]]]))
    parts = []
    for row, (penalty, biases) in zip(rows.tolist(), shapes, strict=True):
        segment = segments[row]
        seen = before[segment][: len(before[segment]) - (ends[segment] - 1 - row)] if penalty != 1.0 else tokens[:0]
        added: dict[int, float] = {}
        for token, bias in biases:
            added[token] = added.get(token, 0.0) + bias
        ids = np.union1d(seen, np.array(list(added), dtype=np.int64)).astype(np.int64)
        penalties = np.where(np.isin(ids, seen), penalty, 1.0)
        parts.append((ids, penalties, np.array([added.get(token, 0.0) for token in ids.tolist()])))
    lengths = [len(ids) for ids, _, _ in parts]

    def joined(column: int, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate([part[column] for part in parts])).to(device, dtype)

    return Shaping(
        rows=torch.from_numpy(np.repeat(np.arange(len(parts)), lengths)).to(device),
        ids=joined(0, torch.int64),
        penalties=joined(1, torch.float32),
        biases=joined(2, torch.float32),
        offsets=tuple(np.concatenate([[0], np.cumsum(lengths)]).tolist()),
    )


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns hidden states into logits: weight [V, D], bias [V], logits * scale, softcap * tanh(logits / softcap).

    grad_into: [V, D] where the weight's gradient is added in place, which saves making and adding a tensor of that size
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    grad_into: Tensor | None = None


def target_logprobs(
    hidden: Tensor, head: Head, rows: LogitRows, *, chunk: int, entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """hidden [N, D] -> [M] float32 log-probabilities with gradient, [M] entropies without.

    Never more than `chunk` rows of logits exist at a time; the backward pass computes them again, unless there is only
    one chunk, which is kept.
    """
    picked = hidden.index_select(0, rows.input_rows)
    logprobs, entropies = _ChunkedLogprobs.apply(picked, head.weight, head.bias, head, rows, chunk, entropy)
    return logprobs, entropies if entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """[U, D] hidden rows -> [M] log-probabilities and [M] entropies."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, rows, chunk, entropy):
        n_rows, n_targets = len(hidden), len(rows.token_ids)
        logprobs = hidden.new_empty(n_targets, dtype=torch.float32)
        entropies = hidden.new_zeros(n_targets, dtype=torch.float32)
        kept = slopes = None
        for start in range(0, n_rows, chunk):
            end = min(start + chunk, n_rows)
            logits, slopes, _ = _logits(hidden[start:end], weight, bias, head, rows, start, end)
            if n_rows <= chunk and head.softcap is None and ctx.needs_input_grad[0]:
                kept = logits
            for low in range(start, end, CACHED_ROWS):
                high = min(low + CACHED_ROWS, end)
                part = logits[low - start : high - start]
                part.sub_(part.amax(dim=1, keepdim=True))
                targets = rows.order[rows.bounds[low] : rows.bounds[high]]
                at = rows.slots[targets] - low
                chosen = part[at, rows.token_ids[targets]]
                probs = part.exp() if entropy else part.exp_()
                total = probs.sum(dim=1)
                log_total = total.log()
                logprobs[targets] = chosen - log_total[at]
                if entropy:
                    mean_logit = torch.bmm(probs[:, None, :], part[:, :, None]).flatten() / total
                    entropies[targets] = (log_total - mean_logit)[at]
                if kept is not None:
                    torch.div(probs, total[:, None], out=part)
            del logits, part, probs
        ctx.save_for_backward(hidden, weight, bias, kept)
        ctx.head, ctx.rows, ctx.chunk = head, rows, chunk
        ctx.slopes = slopes if kept is not None else None
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        hidden, weight, bias, kept = ctx.saved_tensors
        head, rows, chunk = ctx.head, ctx.rows, ctx.chunk
        grad_hidden = torch.empty_like(hidden)
        grad_weight = head.grad_into
        if grad_weight is None and len(hidden) > chunk and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), chunk):
            end = min(start + chunk, len(hidden))
            if kept is not None:
                probs, slopes, cap_slope = kept, ctx.slopes, None
            else:
                probs, slopes, cap_slope = _logits(hidden[start:end], weight, bias, head, rows, start, end, sloped=True)
                _softmax_(probs)
            targets = rows.order[rows.bounds[start] : rows.bounds[end]]
            at = rows.slots[targets] - start
            share = grad[targets] * head.scale
            if rows.temperatures is not None:
                share = share / rows.temperatures[start:end][at, 0]
            mass = grad.new_zeros(end - start).index_add_(0, at, share)
            # d logprob / d logits = onehot - p, for all targets of a row together.
            probs.mul_(-mass[:, None])
            probs.index_put_((at, rows.token_ids[targets]), share, accumulate=True)
            if slopes is not None:
                at, factors = slopes
                probs[at] *= factors
            if cap_slope is not None:
                probs.mul_(cap_slope)
            probs = probs.to(weight.dtype)
            torch.mm(probs, weight, out=grad_hidden[start:end])
            if ctx.needs_input_grad[1]:
                if grad_weight is None:
                    grad_weight = probs.t() @ hidden[start:end]
                else:
                    grad_weight.addmm_(probs.t(), hidden[start:end])
            if grad_bias is not None:
                grad_bias += probs.sum(dim=0)
            del probs
        if head.grad_into is not None:
            grad_weight = None  # added already
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: Head,
    rows: LogitRows,
    start: int,
    end: int,
    sloped: bool = False,
) -> tuple[Tensor, _Slopes | None, Tensor | None]:
    """[end - start, V] float32 logits of the sampled distribution: shaped, temperature applied, support restricted.

    Beside them the slopes of the shaping and, when `sloped`, [end - start, V] that of the soft cap.
    """
    slopes = cap_slope = None
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if head.scale != 1.0:
        logits.mul_(head.scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        cap_slope = 1 - logits.square() if sloped else None
        logits.mul_(head.softcap)
    if rows.shaping is not None:
        slopes = rows.shaping.apply(logits, start, end)
    if rows.temperatures is not None:
        logits.div_(rows.temperatures[start:end])
    if rows.support_offsets is not None:
        for row in range(start, end):
            low, high = rows.support_offsets[row], rows.support_offsets[row + 1]
            if high > low:
                ids = rows.support_ids[low:high]
                inside = logits[row - start, ids]
                logits[row - start].fill_(OUTSIDE)
                logits[row - start, ids] = inside
    return logits, slopes, cap_slope


def _softmax_(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, in place."""
    logits.sub_(logits.amax(dim=1, keepdim=True)).exp_()
    return logits.div_(logits.sum(dim=1, keepdim=True))
