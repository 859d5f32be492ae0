"""Functions over ranges of samples and over vectors, as Prometheus computes them (promql/functions.go)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from windlass.core.metrics.exposition import Labels
from windlass.tasks.observe.promql.tree import Vector

Points = Sequence[tuple[float, float]]
"""(time, value), oldest first."""


# --- ranges ----------------------------------------------------------------------------------------------------------


def increase(points: Points, start: float, end: float) -> float | None:
    """With resets, and extrapolated to the edges of the range, as `extrapolatedRate` does."""
    if len(points) < 2:
        return None
    grown = points[-1][1] - points[0][1]
    for (_, before), (_, after) in pairwise(points):
        if after < before:
            grown += before
    return grown * _stretch(points, start, end, grown)


def delta(points: Points, start: float, end: float) -> float | None:
    if len(points) < 2:
        return None
    return (points[-1][1] - points[0][1]) * _stretch(points, start, end, None)


def _stretch(points: Points, start: float, end: float, grown: float | None) -> float:
    """Sampled interval -> the whole range; a counter is not stretched below zero."""
    first, last = points[0], points[-1]
    sampled = last[0] - first[0]
    if sampled <= 0:
        return 1.0
    average = sampled / (len(points) - 1)
    to_start, to_end = first[0] - start, end - last[0]
    if grown is not None and grown > 0 and first[1] >= 0:
        to_start = min(to_start, sampled * first[1] / grown)
    near = average * 1.1
    whole = sampled + (to_start if to_start < near else average / 2) + (to_end if to_end < near else average / 2)
    return whole / sampled


def rate(points: Points, start: float, end: float) -> float | None:
    grown = increase(points, start, end)
    return None if grown is None else grown / (end - start)


def irate(points: Points, start: float, end: float) -> float | None:
    if len(points) < 2:
        return None
    (before, old), (after, new) = points[-2], points[-1]
    return ((new - old) if new >= old else new) / (after - before) if after > before else None


def changes(points: Points, start: float, end: float) -> float | None:
    pairs = pairwise(points)
    return (
        float(sum(old != new and not (math.isnan(old) and math.isnan(new)) for (_, old), (_, new) in pairs)) if points else None
    )


def resets(points: Points, start: float, end: float) -> float | None:
    return float(sum(new < old for (_, old), (_, new) in pairwise(points))) if points else None


def line(points: Points, at: float) -> tuple[float, float] | None:
    """Least squares: (slope, value at `at`)."""
    if len(points) < 2:
        return None
    count = len(points)
    mean_time = sum(time - at for time, _ in points) / count
    mean = sum(value for _, value in points) / count
    spread = sum((time - at - mean_time) ** 2 for time, _ in points)
    if spread == 0:
        return None
    slope = sum((time - at - mean_time) * (value - mean) for time, value in points) / spread
    return slope, mean - slope * mean_time


def deriv(points: Points, start: float, end: float) -> float | None:
    found = line(points, end)
    return None if found is None else found[0]


def quantile(share: float, values: Sequence[float]) -> float:
    """With interpolation between ranks."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = max(0, min(math.floor(at), len(ordered) - 1))
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (at - low)) + ordered[high] * (at - low)


def _values(points: Points) -> list[float]:
    return [value for _, value in points]


def _maximum(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return max(known) if known else math.nan


def _minimum(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return min(known) if known else math.nan


Over = Callable[[Points, float, float], float | None]
OVER_TIME: Mapping[str, Over] = {
    "rate": rate,
    "irate": irate,
    "increase": increase,
    "delta": delta,
    "deriv": deriv,
    "changes": changes,
    "resets": resets,
    "avg_over_time": lambda points, start, end: sum(_values(points)) / len(points) if points else None,
    "sum_over_time": lambda points, start, end: sum(_values(points)) if points else None,
    "min_over_time": lambda points, start, end: _minimum(_values(points)) if points else None,
    "max_over_time": lambda points, start, end: _maximum(_values(points)) if points else None,
    "count_over_time": lambda points, start, end: float(len(points)) if points else None,
    "last_over_time": lambda points, start, end: points[-1][1] if points else None,
    "present_over_time": lambda points, start, end: 1.0 if points else None,
}

# --- aggregations ----------------------------------------------------------------------------------------------------

AGGREGATE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "min": _minimum,
    "max": _maximum,
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
    "stddev": lambda values: math.sqrt(
        max(sum(value * value for value in values) / len(values) - (sum(values) / len(values)) ** 2, 0.0)
    ),
}

# --- vectors ---------------------------------------------------------------------------------------------------------


def histogram_quantile(share: float, vector: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in vector:
        bound = dict(labels).get("le")
        if bound is not None:
            rest = tuple(pair for pair in labels if pair[0] != "le")
            groups.setdefault(rest, []).append((float(bound), value))
    return [(labels, _bucket_quantile(share, sorted(buckets))) for labels, buckets in groups.items()]


def _bucket_quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float:
    if len(buckets) < 2 or not math.isinf(buckets[-1][0]) or buckets[-1][1] == 0 or math.isnan(buckets[-1][1]):
        return math.nan
    rank = share * buckets[-1][1]
    index = next(place for place, (_, count) in enumerate(buckets) if count >= rank)
    if index == len(buckets) - 1:
        return buckets[-2][0]
    start, below = (0.0, 0.0) if index == 0 else buckets[index - 1]
    bound, count = buckets[index]
    return bound if count == below else start + (bound - start) * (rank - below) / (count - below)
