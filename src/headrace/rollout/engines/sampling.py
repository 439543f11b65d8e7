"""Turns logits into drawn tokens, with their log-probability under the distribution that was really drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.types import SamplingParams

_BLOCK = 256
_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn: its parameters, its random number in [0, 1), the ids that may not come, mask wanted or not."""

    params: SamplingParams
    uniform: float
    banned: tuple[int, ...] = ()
    record: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """token: drawn id; logprob of it; kept: ids that it was drawn from, None for the whole vocabulary."""

    token: int
    logprob: float
    kept: np.ndarray | None = None


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[Drawn | None]:
    """[R, V] logits and R draws into R tokens. None where the logits are not finite.

    The logits may be overwritten. Inverse CDF: the token is the first whose cumulative probability exceeds the random number. No noise over the
    vocabulary is made, so this costs a fraction of `multinomial`.
    """
    logits = logits.float()
    if any(draw.banned for draw in draws):
        for row, draw in enumerate(draws):
            if draw.banned:
                logits[row, list(draw.banned)] = float("-inf")
    out: list[Drawn | None] = [None] * len(draws)
    kinds: dict[str, list[int]] = {}
    for row, draw in enumerate(draws):
        kinds.setdefault(_kind(draw.params), []).append(row)
    for kind, rows in kinds.items():
        part = logits if len(rows) == len(draws) else logits[rows]
        chosen = [draws[row] for row in rows]
        drawn = {"greedy": _greedy, "plain": _plain, "truncated": _truncated}[kind](part, chosen)
        for row, one in zip(rows, drawn, strict=True):
            out[row] = one
    return out


def _kind(params: SamplingParams) -> str:
    if params.temperature == 0.0:
        return "greedy"
    return "truncated" if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else "plain"


def _greedy(logits: torch.Tensor, draws: list[Draw]) -> list[Drawn | None]:
    best, ids = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()
    return [
        Drawn(token, 0.0, np.array([token], dtype=np.int32) if draw.record else None) if ok else None
        for token, ok, draw in zip(ids.tolist(), finite, draws, strict=True)
    ]


def _plain(logits: torch.Tensor, draws: list[Draw]) -> list[Drawn | None]:
    """The whole vocabulary at a temperature, in two levels: first the block of 256 ids, then the id in it."""
    rows, vocab = logits.shape
    scaled = _scale(logits, draws)
    # In place: a fresh [R, V] tensor would cost more in page faults than the arithmetic.
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    coarse = blocks.sum(dim=-1).double().cumsum(dim=-1)
    total = coarse[:, -1]
    target = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64) * total
    block = (coarse <= target[:, None]).sum(dim=-1).clamp_(max=coarse.shape[1] - 1)
    index = torch.arange(rows)
    before = torch.where(block > 0, coarse[index, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[index, block].double()
    fine = inside.cumsum(dim=-1)
    offset = (fine <= (target - before)[:, None]).sum(dim=-1)
    # Rounding may put the target at or past the end of its block; the last id of positive weight is then the one meant.
    for row in torch.nonzero(offset >= _BLOCK).flatten().tolist():
        positive = torch.nonzero(weights[row, : (int(block[row]) + 1) * _BLOCK] > 0).flatten()
        last = int(positive[-1]) if positive.numel() else 0
        block[row], offset[row] = last // _BLOCK, last % _BLOCK
    tokens = (block * _BLOCK + offset).clamp_(max=vocab - 1)
    logprobs = weights[index, tokens].double().log() - total.log()
    everything = np.arange(vocab, dtype=np.int32) if any(draw.record for draw in draws) else None
    out: list[Drawn | None] = []
    for token, logprob, ok, draw in zip(
        tokens.tolist(), logprobs.tolist(), torch.isfinite(total).tolist(), draws, strict=True
    ):
        kept = None
        if draw.record:
            kept = np.delete(everything, list(draw.banned)) if draw.banned else everything
        out.append(Drawn(token, min(logprob, 0.0), kept) if ok else None)
    return out


def _truncated(logits: torch.Tensor, draws: list[Draw]) -> list[Drawn | None]:
    """top-k, then top-p of what is left, then min-p: on rows sorted by weight each keeps a prefix."""
    vocab = logits.shape[1]
    scaled = _scale(logits, draws)
    whole = torch.logsumexp(scaled, dim=-1)
    width = max((draw.params.top_k or _CANDIDATES) for draw in draws)
    values, ids = torch.topk(scaled, min(width, vocab), dim=-1)
    out: list[Drawn | None] = []
    for row, draw in enumerate(draws):
        if not bool(torch.isfinite(whole[row])):
            out.append(None)
            continue
        kept = _keep(values[row], whole[row], draw.params)
        row_values, row_ids = values[row], ids[row]
        if kept == row_values.numel() < vocab and kept != draw.params.top_k:
            # The nucleus is wider than the candidates.
            row_values, row_ids = torch.sort(scaled[row], descending=True, stable=True)
            kept = _keep(row_values, whole[row], draw.params)
        out.append(_draw_prefix(row_values[:kept], row_ids[:kept], draw))
    return out


def _keep(values: torch.Tensor, whole: torch.Tensor, params: SamplingParams) -> int:
    """How many of the descending values stay; `whole` is the log of the normaliser of the full row."""
    count = values.numel()
    if params.top_k > 0:
        count = min(count, params.top_k)
        whole = torch.logsumexp(values[:count], dim=-1)
    values = values[:count]
    count = int(torch.isfinite(values).sum())
    if params.top_p < 1.0:
        shares = (values - whole).double().exp()
        # A token stays while the mass before it is below top_p.
        count = min(count, int(((shares.cumsum(-1) - shares) < params.top_p).sum()))
    if params.min_p > 0.0:
        count = min(count, int(((values - values[0]).double().exp() >= params.min_p).sum()))
    return max(count, 1)


def _draw_prefix(values: torch.Tensor, ids: torch.Tensor, draw: Draw) -> Drawn:
    weights = (values - values[0]).double().exp()
    cumulative = weights.cumsum(-1)
    total = cumulative[-1]
    at = int((cumulative <= draw.uniform * total).sum())
    at = min(at, int(torch.nonzero(weights > 0)[-1]))
    logprob = float((values[at] - values[0]).double() - total.log())
    kept = np.sort(ids.numpy().astype(np.int32)) if draw.record else None
    return Drawn(int(ids[at]), min(logprob, 0.0), kept)


def _scale(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    temperatures = [draw.params.temperature for draw in draws]
    if all(t == 1.0 for t in temperatures):
        return logits
    return logits.div_(torch.tensor(temperatures, dtype=logits.dtype)[:, None])
