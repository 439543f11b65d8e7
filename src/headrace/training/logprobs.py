"""Turns hidden states into log-probabilities of given tokens, a chunk of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.types import TokenBatch

OUTSIDE = -1e30
"""The logit of a token outside the support: finite, so that 0 probability times it is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """Which logits are needed: U rows for M targets. Siblings' first tokens share one row.

    input_rows: [U] row of the hidden states; temperatures: [U, 1]
    slots: [M] the logit row of each target; token_ids: [M]
    bounds: for each target in the order of slots, where the targets of row u start: [U+1]; order: [M] that order
    support_ids, support_offsets: row u may only draw support_ids[offsets[u]:offsets[u+1]], everything where that is empty
    """

    input_rows: Tensor
    temperatures: Tensor
    slots: Tensor
    token_ids: Tensor
    order: Tensor
    bounds: tuple[int, ...]
    support_ids: Tensor | None = None
    support_offsets: tuple[int, ...] | None = None


def logit_rows(batch: TokenBatch, device: torch.device | str = "cpu") -> LogitRows:
    """The logit rows of a batch: one for each input row, temperature and (when recorded) target's own support.

    Temperature 0 (greedy) counts as 1, as it does where the engine reports it.
    """
    temperatures = np.asarray(batch.temperatures, dtype=np.float32)[batch.target_samples]
    temperatures = np.where(temperatures == 0, np.float32(1), temperatures)
    rows = np.asarray(batch.target_rows, dtype=np.int64)
    mask = batch.sampling_mask
    own = np.arange(len(rows)) if mask is not None else np.zeros(len(rows), dtype=np.int64)
    keys = np.stack([rows, temperatures.view(np.int32).astype(np.int64), own], axis=1)
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
        temperatures=torch.from_numpy(temperatures[first]).to(device)[:, None],
        slots=torch.from_numpy(slots.astype(np.int64)).to(device),
        token_ids=torch.from_numpy(np.asarray(batch.target_ids, dtype=np.int64)).to(device),
        order=torch.from_numpy(order).to(device),
        bounds=tuple(bounds.tolist()),
        support_ids=support_ids,
        support_offsets=support_offsets,
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
        kept = None
        for start in range(0, n_rows, chunk):
            end = min(start + chunk, n_rows)
            logits = _logits(hidden[start:end], weight, bias, head, rows, start, end)
            logits.sub_(logits.amax(dim=1, keepdim=True))
            targets = rows.order[rows.bounds[start] : rows.bounds[end]]
            at = rows.slots[targets] - start
            chosen = logits[at, rows.token_ids[targets]]
            probs = logits.exp() if entropy else logits.exp_()
            total = probs.sum(dim=1)
            log_total = total.log()
            logprobs[targets] = chosen - log_total[at]
            if entropy:
                mean_logit = torch.bmm(probs[:, None, :], logits[:, :, None]).flatten() / total
                entropies[targets] = (log_total - mean_logit)[at]
            if n_rows <= chunk and head.softcap is None and ctx.needs_input_grad[0]:
                kept = probs.div_(total[:, None])
            del logits, probs
        ctx.save_for_backward(hidden, weight, bias, kept)
        ctx.head, ctx.rows, ctx.chunk = head, rows, chunk
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
            slope = None
            if kept is not None:
                probs = kept
            else:
                logits = _logits(hidden[start:end], weight, bias, head, rows, start, end)
                if head.softcap is not None:
                    raw = logits * rows.temperatures[start:end]
                    slope = 1 - (raw / head.softcap).square_()
                probs = torch.softmax(logits, dim=1) if slope is not None else _softmax_(logits)
            targets = rows.order[rows.bounds[start] : rows.bounds[end]]
            at = rows.slots[targets] - start
            mass = grad.new_zeros(end - start).index_add_(0, at, grad[targets])
            # d logprob / d logits = onehot - p, for all targets of a row together.
            probs.mul_(-mass[:, None])
            probs.index_put_((at, rows.token_ids[targets]), grad[targets], accumulate=True)
            probs.mul_(head.scale / rows.temperatures[start:end])
            if slope is not None:
                # Outside the support the stand-in logit has no slope, and its probability is 0 already.
                probs.mul_(slope.nan_to_num_().clamp_(min=0))
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
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, rows: LogitRows, start: int, end: int
) -> Tensor:
    """[end - start, V] float32 logits of the sampled distribution: temperature applied, support restricted."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if head.scale != 1.0:
        logits.mul_(head.scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    logits.div_(rows.temperatures[start:end])
    if rows.support_offsets is not None:
        for row in range(start, end):
            low, high = rows.support_offsets[row], rows.support_offsets[row + 1]
            if high > low:
                ids = rows.support_ids[low:high]
                inside = logits[row - start, ids]
                logits[row - start].fill_(OUTSIDE)
                logits[row - start, ids] = inside
    return logits


def _softmax_(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, in place."""
    logits.sub_(logits.amax(dim=1, keepdim=True)).exp_()
    return logits.div_(logits.sum(dim=1, keepdim=True))
