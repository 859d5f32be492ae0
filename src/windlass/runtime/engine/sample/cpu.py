"""Min-p, top-k, top-p and sampling for one row in host memory. The same result as filters.py for many rows on a device.

NumPy is several times as fast as PyTorch for one row, and starts no threads: the kernels' threads keep spinning between steps, and two
thread pools on the same cores slow each other down.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
BLOCK = 64


def draw_row(logits: Floats, top_k: int | None, top_p: float, min_p: float, uniform: float) -> int | None:
    """`logits` [tokens], already divided by the temperature; None if the largest is NaN or infinite."""
    best = logits.max()
    if not math.isfinite(best):
        return None
    least = best + math.log(min_p) if min_p else -math.inf
    if top_k is not None and top_k < len(logits):
        return _draw_top_k(logits, best, least, top_k, top_p, uniform)
    weights = np.exp(logits - best)
    if min_p:
        weights *= logits >= least
    if top_p == 1:
        return _passed(weights, uniform)
    total = float(weights.sum(dtype=np.float64))
    ids = _holding(logits, weights, best, least, top_p * total)
    return _draw_among(ids, logits[ids], total, top_p, uniform)


def _draw_top_k(logits: Floats, best: np.float32, least: float, top_k: int, top_p: float, uniform: float) -> int:
    ids = np.flatnonzero(logits >= max(_at_least(logits, top_k), least))
    ids = np.sort(ids[np.argsort(-logits[ids], kind="stable")[:top_k]])
    total = float(np.exp((logits[ids] - best).astype(np.float64)).sum())
    return _draw_among(ids, logits[ids], total, top_p, uniform)


def _draw_among(ids: NDArray[np.int64], values: Floats, total: float, top_p: float, uniform: float) -> int:
    """`ids` ascending: of equal logits the lower id counts as more likely."""
    order = np.argsort(-values, kind="stable")
    weights = np.exp((values[order] - values[order[0]]).astype(np.float64))
    before = np.cumsum(weights) - weights
    kept = np.sort(order[: max(int(np.searchsorted(before, top_p * total)), 1)])
    chosen = np.exp((values[kept] - values[order[0]]).astype(np.float64))
    return int(ids[kept[_passed(chosen, uniform)]])


def _at_least(logits: Floats, count: int) -> float:
    """A threshold that at least `count` logits reach, and not many more: the count-th largest of the blocks' maxima."""
    if count * 2 > len(logits) // BLOCK:
        return float(np.partition(logits, -count)[-count])
    best = np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
    return float(np.partition(best, -count)[-count])


def _holding(logits: Floats, weights: Floats, best: np.float32, least: float, mass: float) -> NDArray[np.int64]:
    """The most likely tokens, ascending, enough to hold `mass`."""
    for below in (4.0, 8.0, 16.0):
        ids = np.flatnonzero(logits >= max(best - below, least))
        if float(weights[ids].sum(dtype=np.float64)) > mass:
            return ids
    return np.flatnonzero(logits >= least)


def _passed(weights: NDArray[np.floating], uniform: float) -> int:
    """Inverse CDF: where the running sum passes this fraction of the total. Block sums first, then within a block."""
    starts = np.arange(0, len(weights), BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    before = sums[block - 1] if block else 0.0
    inner = np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    # The same numbers summed in another order: the target must stay below the total.
    return int(starts[block] + np.searchsorted(inner, min(target - before, inner[-1] * (1 - 2.0**-50)), side="right"))
