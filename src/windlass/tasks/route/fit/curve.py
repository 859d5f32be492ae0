"""Quality against calls of the large model, of two models: PGR, APGR and CPT as in RouteLLM (arXiv 2406.18665, section 4).

PGR: the share of the gap between the small and the large model that a router closes; APGR: its mean over all shares of calls (random
is 0.5); CPT50: the share of calls of the large model at which half the gap is closed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen

NUM_RESAMPLES = 300
Pair = tuple[float, float]


class GapCurve(Frozen):
    apgr: float
    cpt50: float
    cpt80: float
    apgr_interval: Pair | None = None
    cpt50_interval: Pair | None = None
    cpt80_interval: Pair | None = None
    """Of 95 %, by the bootstrap."""
    how: str = ""


def gap_curve(order: NDArray[np.float64], small: NDArray[np.float64], large: NDArray[np.float64]) -> GapCurve | None:
    """`order`: who is sent to the large model first (highest). None: the large model is no better, so there is no gap."""
    return _weighted(_steps(order), large - small, np.ones(len(order)))


def _steps(order: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows as they are sent, and where each run of equal ones ends: they are sent in random order, which is a straight line."""
    by = np.argsort(-order, kind="stable")
    return by, np.append(np.flatnonzero(np.diff(order[by])), len(by) - 1)


def _weighted(
    steps: tuple[NDArray[np.int64], NDArray[np.int64]], gains: NDArray[np.float64], weights: NDArray[np.float64]
) -> GapCurve | None:
    total = float(gains @ weights)
    if total <= 0:
        return None
    by, ends = steps
    calls = np.concatenate(([0.0], np.cumsum(weights[by])[ends])) / weights.sum()
    closed = np.concatenate(([0.0], np.cumsum((gains * weights)[by])[ends])) / total
    area = float(((closed[1:] + closed[:-1]) / 2 * np.diff(calls)).sum())
    return GapCurve(apgr=area, cpt50=_calls_at(calls, closed, 0.5), cpt80=_calls_at(calls, closed, 0.8))


def _calls_at(calls: NDArray[np.float64], closed: NDArray[np.float64], share: float) -> float:
    """Where the curve first reaches the share, between two points along the line."""
    after = int(np.argmax(closed >= share))
    rise = closed[after] - closed[after - 1]
    part = (share - closed[after - 1]) / rise if rise > 0 else 1.0
    return float(calls[after - 1] + part * (calls[after] - calls[after - 1]))


def with_intervals(
    order: NDArray[np.float64],
    small: NDArray[np.float64],
    large: NDArray[np.float64],
    how: str,
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> GapCurve | None:
    """`clusters`: rows that are resampled together, for the question whether it would hold for other sources."""
    found = gap_curve(order, small, large)
    if found is None:
        return None
    random, gains, steps = np.random.default_rng(seed), large - small, _steps(order)
    numbers: dict[Hashable, int] = {}
    which = np.array([numbers.setdefault(one, len(numbers)) for one in (range(len(order)) if clusters is None else clusters)])
    count = len(numbers)
    drawn = [
        _weighted(steps, gains, random.multinomial(count, np.full(count, 1 / count)).astype(np.float64)[which])
        for _ in range(NUM_RESAMPLES)
    ]
    known = [one for one in drawn if one is not None]
    bounds = {f"{name}_interval": _bounds([getattr(one, name) for one in known]) for name in ("apgr", "cpt50", "cpt80")}
    return msgspec.structs.replace(found, how=how, **bounds)


def _bounds(values: Sequence[float]) -> Pair:
    low, high = np.quantile(np.array(values), (0.025, 0.975)).tolist()
    return low, high
