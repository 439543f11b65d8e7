"""Turns logits into drawn tokens, with their log-probability under the distribution that was really drawn from.

In this order: repetition penalty, logit bias, ids that may not come, temperature, top-k, top-p, min-p. Each later one sees
what the earlier ones left. The token is drawn by inverse CDF, over ids in ascending order: it is the first whose
cumulative probability exceeds the row's random number. No noise over the vocabulary is made, and two computations of the
same logits give different tokens only where that number lies between their bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from headrace.types import SamplingParams

_BLOCK = 256
_CANDIDATES = 512
_EVERYTHING = np.zeros(0, dtype=np.int32)
"""The record of a token that was drawn from the whole vocabulary."""


class Draw(NamedTuple):
    """How one row is drawn.

    uniform: its random number in [0, 1); banned: ids that may not come; record: whether the kept ids are wanted
    seen: the sequence so far, for a repetition penalty
    """

    params: SamplingParams
    uniform: float
    banned: tuple[int, ...] = ()
    record: bool = False
    seen: Sequence[int] = ()


class Drawn(NamedTuple):
    """token: drawn id; logprob of it; kept: ascending ids that it was drawn from, none of them listed for all."""

    token: int
    logprob: float
    kept: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """R drawn tokens as tensors.

    tokens, logprobs: [R]; finite: [R] False where the logits were not, and nothing else holds
    kept: [R, W] ascending ids, of which the first counts[r] were drawn from; None for the whole vocabulary
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    finite: torch.Tensor
    kept: torch.Tensor | None = None
    counts: torch.Tensor | None = None


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[Drawn | None]:
    """[R, V] logits and R draws into R tokens. None where the logits are not finite. The logits may be overwritten."""
    logits = logits.float()
    kinds: dict[str, list[int]] = {}
    for row, draw in enumerate(draws):
        if draw.banned or shapes_logits(draw.params):
            _shape(logits[row], draw)
        kinds.setdefault(_kind(draw.params), []).append(row)
    if len(kinds) == 1:
        return _draw(*kinds, logits, draws)
    out: list[Drawn | None] = [None] * len(draws)
    for kind, rows in kinds.items():
        for row, one in zip(rows, _draw(kind, logits[rows], [draws[row] for row in rows]), strict=True):
            out[row] = one
    return out


def shapes_logits(params: SamplingParams) -> bool:
    """Whether more than temperature and truncation stands between the model's logits and the draw."""
    return bool(params.logit_bias or params.allowed_token_ids or params.repetition_penalty != 1.0)


def _shape(row: torch.Tensor, draw: Draw) -> None:
    """[V] in place. The penalty is that of Keskar et al. 2019 (CTRL), eq. 4.1 in the form that Hugging Face gave it: logits
    of ids seen in prompt or answer are divided by it where positive, and multiplied where negative."""
    params = draw.params
    if params.repetition_penalty != 1.0 and len(draw.seen):
        ids = torch.tensor(draw.seen).unique()
        seen = row[ids]
        row[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        row.index_add_(0, torch.tensor(ids), torch.tensor(biases, dtype=row.dtype))
    if params.allowed_token_ids:
        ids = torch.tensor(params.allowed_token_ids)
        allowed = row[ids]
        row.fill_(float("-inf"))
        row[ids] = allowed
    if draw.banned:
        row[list(draw.banned)] = float("-inf")


def _kind(params: SamplingParams) -> str:
    if params.temperature == 0.0:
        return "greedy"
    return "truncated" if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else "plain"


def _draw(kind: str, logits: torch.Tensor, draws: list[Draw]) -> list[Drawn | None]:
    if kind == "greedy":
        rows = _greedy(logits)
    else:
        scaled = _scale(logits, draws)
        uniforms = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64)
        if kind == "plain":
            # Before drawing, which overwrites them.
            limited = [_allowed(scaled[row], draw) if draw.record else None for row, draw in enumerate(draws)]
            rows = draw_plain(scaled, uniforms)
        else:
            params = [draw.params for draw in draws]
            rows = draw_truncated(
                scaled,
                uniforms,
                top_k=torch.tensor([one.top_k for one in params]),
                top_p=torch.tensor([one.top_p for one in params], dtype=torch.float64),
                min_p=torch.tensor([one.min_p for one in params], dtype=torch.float64),
            )
    found = zip(rows.tokens.tolist(), rows.logprobs.clamp(max=0.0).tolist(), rows.finite.tolist(), draws, strict=True)
    out: list[Drawn | None] = []
    for row, (token, logprob, finite, draw) in enumerate(found):
        kept = None
        if draw.record and rows.kept is None:
            kept = limited[row]
        elif draw.record:
            kept = rows.kept[row, : int(rows.counts[row])].numpy().astype(np.int32)
        out.append(Drawn(token, logprob, kept) if finite else None)
    return out


def _allowed(scaled: torch.Tensor, draw: Draw) -> np.ndarray:
    """Ids that a row without truncation is drawn from; none are listed where nothing was taken out."""
    if not (draw.banned or draw.params.allowed_token_ids):
        return _EVERYTHING
    return torch.nonzero(scaled > float("-inf")).flatten().numpy().astype(np.int32)


def _greedy(logits: torch.Tensor) -> Rows:
    best, ids = logits.max(dim=-1)
    return Rows(ids, torch.zeros_like(best), torch.isfinite(best), ids[:, None], torch.ones_like(ids))


def draw_plain(scaled: torch.Tensor, uniforms: torch.Tensor) -> Rows:
    """[R, V] logits, overwritten, and [R] numbers in [0, 1), in two levels: first the block of 256 ids (or all of fewer),
    then the id."""
    rows, vocab = scaled.shape
    # In place: a fresh [R, V] tensor would cost more in page faults than the arithmetic.
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()
    size = min(_BLOCK, vocab)
    if vocab % size:
        weights = torch.nn.functional.pad(weights, (0, size - vocab % size))
    blocks = weights.view(rows, -1, size)
    coarse = blocks.sum(dim=-1).double().cumsum(dim=-1)
    total = coarse[:, -1]
    target = uniforms * total
    block = (coarse <= target[:, None]).sum(dim=-1).clamp_(max=coarse.shape[1] - 1)
    index = torch.arange(rows)
    before = torch.where(block > 0, coarse[index, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[index, block].double()
    fine = inside.cumsum(dim=-1)
    offset = (fine <= (target - before)[:, None]).sum(dim=-1)
    # Rounding may put the target at or past the end of its block; the last id of positive weight is then the one meant.
    for row in torch.nonzero(offset >= size).flatten().tolist():
        positive = torch.nonzero(weights[row, : (int(block[row]) + 1) * size] > 0).flatten()
        last = int(positive[-1]) if positive.numel() else 0
        block[row], offset[row] = last // size, last % size
    tokens = (block * size + offset).clamp_(max=vocab - 1)
    return Rows(tokens, weights[index, tokens].double().log() - total.log(), torch.isfinite(total))


def draw_truncated(
    scaled: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    candidates: int = _CANDIDATES,
) -> Rows:
    """[R, V] logits and R rows' settings into tokens: top-k, then top-p of what is left, then min-p of that.

    candidates: how many of a row without top-k are sorted at first; rows that keep more are done again with eight times as many
    """
    vocab = scaled.shape[1]
    whole = torch.logsumexp(scaled, dim=-1)
    widest = int(torch.where(top_k > 0, top_k, candidates).max())
    values, ids = torch.topk(scaled, min(widest, vocab), dim=-1)
    keep = _keep(values, whole, top_k, top_p, min_p)
    if values.shape[1] < vocab and bool((wide := keep[:, -1] & (top_k == 0)).any()):
        parts = []
        for rows, wider in ((wide, candidates * 8), (~wide, candidates)):
            own = dict(top_k=top_k[rows], top_p=top_p[rows], min_p=min_p[rows], candidates=wider)
            if bool(rows.any()):
                parts.append((draw_truncated(scaled[rows], uniforms[rows], **own), rows))
        return parts[0][0] if len(parts) == 1 else _merge(parts, vocab)
    counts = keep.sum(dim=-1)
    width = int(counts.max())
    keep, values, ids = keep[:, :width], values[:, :width], ids[:, :width]
    kept, order = torch.where(keep, ids, vocab).sort(dim=-1)
    weights = torch.where(keep, (values - values[:, :1]).double().exp(), 0.0).gather(1, order)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    at = (cumulative <= (uniforms * total)[:, None]).sum(dim=-1)
    # Rounding may put the number at or past the end; the last id of positive weight is then the one meant.
    last = (torch.arange(width) * (weights > 0)).amax(dim=-1)
    at = torch.minimum(at, last)[:, None]
    logprobs = weights.gather(1, at)[:, 0].log() - total.log()
    return Rows(kept.gather(1, at)[:, 0], logprobs, torch.isfinite(whole), kept, counts)


def _keep(
    values: torch.Tensor, whole: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[R, W] which of a row's descending values stay, always a beginning of them; `whole`: log of each row's normaliser."""
    places = torch.arange(values.shape[1])
    keep = ((places < top_k[:, None]) | (top_k == 0)[:, None]) & (values > float("-inf"))
    if bool((top_p < 1.0).any()):
        left = torch.where(top_k > 0, torch.where(keep, values, float("-inf")).logsumexp(dim=-1), whole)
        shares = torch.where(keep, (values - left[:, None]).double().exp(), 0.0)
        # A token stays while the mass before it is below top_p.
        keep &= (shares.cumsum(dim=-1) - shares < top_p[:, None]) | (top_p >= 1.0)[:, None]
    if bool((min_p > 0.0).any()):
        keep &= (values - values[:, :1]).double().exp() >= min_p[:, None]
    keep[:, 0] = True
    return keep


def _merge(parts: list[tuple[Rows, torch.Tensor]], vocab: int) -> Rows:
    """Sets of rows back into one, each to the places that its mask [R] names."""
    first, places = parts[0]
    count, width = len(places), max(part.kept.shape[1] for part, _ in parts)
    merged = Rows(
        first.tokens.new_empty(count),
        first.logprobs.new_empty(count),
        first.finite.new_empty(count),
        first.kept.new_full((count, width), vocab),
        first.counts.new_empty(count),
    )
    for part, rows in parts:
        for name in ("tokens", "logprobs", "finite", "counts"):
            getattr(merged, name)[rows] = getattr(part, name)
        merged.kept[rows, : part.kept.shape[1]] = part.kept
    return merged


def _scale(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    temperatures = [draw.params.temperature for draw in draws]
    if all(t == 1.0 for t in temperatures):
        return logits
    return logits.div_(torch.tensor(temperatures, dtype=logits.dtype)[:, None])
