"""Min-p, top-k, top-p and sampling for all rows at once: exact, and rarely sorting a whole vocabulary.

The most likely tokens almost always decide which ones are kept. So the top 128 are looked at first; only a row that they do not decide
(a flat distribution, or ties at the cut) is sorted further. Of equal logits the lower id counts as more likely. Weights are summed in
double precision in the order of ids, so that the result depends on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_CANDIDATES = (128, 4096)
"""Tokens looked at first, then if they do not suffice; then all."""
BLOCK = 256
"""Weights per partial sum: a running sum over blocks, then within one block."""


@dataclass(frozen=True)
class Filters:
    """One value per row, on the device of the logits."""

    top_k: Tensor
    """int64; the vocabulary size if there is no top-k."""
    top_p: Tensor
    """float64."""
    min_p: Tensor
    """float32."""

    def rows(self, chosen: Tensor) -> Filters:
        return Filters(self.top_k[chosen], self.top_p[chosen], self.min_p[chosen])


def draw(logits: Tensor, filters: Filters | None, uniforms: Tensor) -> Tensor:
    """Token ids int64 [rows]; `logits` float32 [rows, tokens], already divided by the temperature; `uniforms` float64 [rows].

    `filters` None: from all tokens.
    """
    if filters is None:
        return _draw((logits - logits.amax(-1, keepdim=True)).exp_(), uniforms)
    width = logits.shape[1]
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    limited = (filters.top_k < width) | (filters.top_p < 1)
    for chosen, drawing in ((limited, _draw_limited), (~limited, _draw_min_p)):
        rows = chosen.nonzero()[:, 0]
        if len(rows):
            part = logits if len(rows) == len(logits) else logits[rows]
            ids[rows] = drawing(part, filters.rows(rows), uniforms[rows])
    return ids


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF: the first place where the running sum passes `uniforms` times the total; weights [rows, n], float32 or float64."""
    count = weights.shape[1]
    whole = count // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)
    if whole < count:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)
    block, target = _passed(sums, uniforms[:, None])
    places = block * BLOCK + torch.arange(min(BLOCK, count), device=weights.device)
    inner = weights.gather(1, places.clamp(max=count - 1)).double() * (places < count)
    # The same numbers summed in another order: the fraction must stay below the total.
    fraction = (target / sums.gather(1, block)).clamp(max=1 - 2.0**-50)
    place, _ = _passed(inner, fraction)
    return places.gather(1, place)[:, 0]


def _passed(weights: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, 1]: where the running sum passes the fraction of the total, and how far into that element."""
    sums = weights.cumsum(-1)
    target = fractions * sums[:, -1:]
    place = torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)
    return place, target - (sums - weights).gather(1, place)


def _draw_min_p(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    best = logits.amax(-1, keepdim=True)
    return _draw(_all_weights(logits, best, best + filters.min_p.log()[:, None]), uniforms)


def _draw_limited(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    width = logits.shape[1]
    limits = filters.top_k[filters.top_k < width]
    least = int(limits.max()) + 1 if len(limits) else 0  # one more, to detect ties at the cut
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rows = torch.arange(len(logits), device=logits.device)
    totals = _totals(logits, filters)
    for count in (*NUM_CANDIDATES, width):
        part = logits if len(rows) == len(logits) else logits[rows]
        found, undecided = _draw_among(part, min(max(count, least), width), filters.rows(rows), totals[rows], uniforms[rows])
        ids[rows] = found
        rows = rows[undecided]
        if not len(rows):
            break
    return ids


def _totals(logits: Tensor, filters: Filters) -> Tensor:
    """Sum of the weights that min-p keeps, for rows without top-k; float64 [rows]."""
    if bool((filters.top_k < logits.shape[1]).all()):
        return torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    best = logits.amax(-1, keepdim=True)
    return _all_weights(logits, best, best + filters.min_p.log()[:, None]).sum(-1, dtype=torch.float64)


def _all_weights(logits: Tensor, best: Tensor, least: Tensor) -> Tensor:
    weights = (logits - best).exp_()
    return weights.mul_(logits >= least) if bool(least.isfinite().any()) else weights


def _draw_among(logits: Tensor, count: int, filters: Filters, totals: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sampled from the `count` most likely tokens, and which rows need more of them."""
    values, ids = most_likely(logits, count)
    keep = _kept(values, filters, logits.shape[1], totals)
    last = values.masked_fill(~keep, torch.inf).amin(-1)
    undecided = (values[:, -1] >= last) if count < logits.shape[1] else torch.zeros_like(last, dtype=torch.bool)
    ids, order = ids.sort(dim=-1)
    place = _draw((_weights(values) * keep).gather(1, order), uniforms)
    return ids.gather(1, place[:, None])[:, 0], undecided


def most_likely(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids, best first, the lower id first among equals."""
    if count >= logits.shape[1]:
        return logits.sort(dim=-1, descending=True, stable=True)
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _kept(values: Tensor, filters: Filters, width: int, totals: Tensor) -> Tensor:
    """Which of the most likely tokens are kept. Each filter sees the probabilities that the one before leaves."""
    places = torch.arange(values.shape[1], device=values.device)
    keep = (places < filters.top_k[:, None]) & (values >= values[:, :1] + filters.min_p.log()[:, None])
    weights = _weights(values) * keep
    totals = torch.where(filters.top_k < width, weights.sum(-1), totals)
    before = weights.cumsum(-1) - weights
    return keep & (before < (filters.top_p * totals)[:, None])


def _weights(values: Tensor) -> Tensor:
    """Of tokens sorted by likelihood, relative to the first."""
    return (values - values[:, :1]).double().exp()
