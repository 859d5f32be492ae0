"""A condition over our own history -> the series for which it holds, as Prometheus would compute them at that time (promql/functions.go)."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

from windlass.core.metrics.exposition import Labels
from windlass.tasks.observe.conditions.condition import Binary, Condition, Grouped, Latest, Mapped, Now, Operand, Where, Windowed
from windlass.tasks.observe.history.series import Points, SeriesStore

Vector = list[tuple[Labels, float]]
LOOKBACK_SECONDS = 300.0
"""How old the newest sample of a series may be (Prometheus' --query.lookback-delta)."""
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
}  # fmt: skip
COMPUTE: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda left, right: left / right if right else _over_zero(left),
}  # fmt: skip


def _over_zero(value: float) -> float:
    return math.nan if not value or math.isnan(value) else math.copysign(math.inf, value)


def evaluate(condition: Operand, store: SeriesStore, now: float) -> Vector:
    match condition:
        case Latest():
            return _latest(condition, store, now)
        case Windowed():
            return _windowed(condition, store, now)
        case Grouped():
            return _grouped(condition, evaluate(condition.of, store, now))
        case Mapped():
            apply = abs if condition.function == "abs" else partial(max, condition.least)
            return [(labels, apply(value)) for labels, value in evaluate(condition.of, store, now)]
        case Binary():
            return _binary(condition, store, now)
        case float() | int():
            return [((), float(condition))]
        case _:
            raise TypeError(condition)


# --- series ----------------------------------------------------------------------------------------------------------


def _found(series: Latest, store: SeriesStore) -> list[Labels]:
    return [labels for labels in store.names(series.name) if all(_fits(dict(labels), where) for where in series.where)]


def _fits(labels: Mapping[str, str], where: Where) -> bool:
    value = labels.get(where.label, "")
    if where.op in ("=", "!="):
        return (value == where.value) == (where.op == "=")
    return (_pattern(where.value).fullmatch(value) is not None) == (where.op == "=~")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


def _latest(series: Latest, store: SeriesStore, now: float) -> Vector:
    end = now - series.ago
    values = [(labels, store.latest(series.name, labels, end - LOOKBACK_SECONDS, end)) for labels in _found(series, store)]
    return [(labels, value) for labels, value in values if value is not None]


def _windowed(window: Windowed, store: SeriesStore, now: float) -> Vector:
    end = now - window.series.ago
    start = end - window.seconds
    found: Vector = []
    for labels in _found(window.series, store):
        value = _over(window, store.points(window.series.name, labels, start, end), start, end)
        if value is not None:
            found.append((labels, value))
    return found


# --- windows ---------------------------------------------------------------------------------------------------------


def _over(window: Windowed, points: Points, start: float, end: float) -> float | None:
    """None: too few points."""
    values = [value for _, value in points]
    if not values or (len(values) == 1 and window.function in ("rate", "increase", "deriv", "predict_linear")):
        return None
    match window.function:
        case "rate":
            return _increase(points, start, end) / window.seconds
        case "increase":
            return _increase(points, start, end)
        case "changes":
            return float(sum(old != new and not (math.isnan(old) and math.isnan(new)) for old, new in pairwise(values)))
        case "deriv":
            return _line(points, end)[0]
        case "predict_linear":
            slope, last = _line(points, end)
            return last + slope * window.parameter
        case "avg_over_time":
            return sum(values) / len(values)
        case "min_over_time":
            return _least(values)
        case "count_over_time":
            return float(len(values))
        case "quantile_over_time":
            return _quantile(window.parameter, values)


def _increase(points: Points, start: float, end: float) -> float:
    """With resets, and extrapolated to the edges of the window, as `extrapolatedRate` does; a counter is not stretched below zero."""
    (first_time, first), (last_time, last) = points[0], points[-1]
    grown = last - first + sum(before for (_, before), (_, after) in pairwise(points) if after < before)
    sampled = last_time - first_time
    average = sampled / (len(points) - 1)
    to_start, to_end = first_time - start, end - last_time
    if grown > 0 and first >= 0:
        to_start = min(to_start, sampled * first / grown)
    near = average * 1.1
    whole = sampled + (to_start if to_start < near else average / 2) + (to_end if to_end < near else average / 2)
    return grown * whole / sampled


def _line(points: Points, at: float) -> tuple[float, float]:
    """Least squares: (slope, value at `at`)."""
    count = len(points)
    mean_time = sum(time - at for time, _ in points) / count
    mean = sum(value for _, value in points) / count
    spread = sum((time - at - mean_time) ** 2 for time, _ in points)
    slope = sum((time - at - mean_time) * (value - mean) for time, value in points) / spread
    return slope, mean - slope * mean_time


def _quantile(share: float, values: Sequence[float]) -> float:
    """With interpolation between ranks."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (at - low)) + ordered[high] * (at - low)


# --- several series --------------------------------------------------------------------------------------------------


def _least(values: Sequence[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _most(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _grouped(grouped: Grouped, found: Vector) -> Vector:
    groups: dict[Labels, Vector] = {}
    for labels, value in found:
        groups.setdefault(_only(labels, grouped.by), []).append((labels, value))
    if grouped.op == "bottomk":
        return [min(members, key=lambda pair: pair[1]) for members in groups.values()]
    combine = {"sum": sum, "min": _least, "max": _most}[grouped.op]
    return [(labels, combine([value for _, value in members])) for labels, members in groups.items()]


def _only(labels: Labels, names: Sequence[str]) -> Labels:
    return tuple(pair for pair in labels if pair[0] in names)


# --- two sides -------------------------------------------------------------------------------------------------------


def _binary(binary: Binary, store: SeriesStore, now: float) -> Vector:
    left_number, right_number = _number(binary.left, now), _number(binary.right, now)
    if left_number is not None:
        return [(labels, COMPUTE[binary.op](left_number, value)) for labels, value in evaluate(binary.right, store, now)]
    left = evaluate(binary.left, store, now)
    if right_number is not None:
        return _combined(binary.op, [(labels, value, right_number) for labels, value in left])
    right = evaluate(binary.right, store, now)
    return _sets(binary, left, right) if binary.op in ("and", "or", "unless") else _matched(binary, left, right)


def _number(side: Operand, now: float) -> float | None:
    if isinstance(side, Now):
        return now
    return None if isinstance(side, Condition) else side


def _matched(binary: Binary, left: Vector, right: Vector) -> Vector:
    table = {_key(binary, labels): value for labels, value in right}
    both = [(labels, value, table[key]) for labels, value in left if (key := _key(binary, labels)) in table]
    found = _combined(binary.op, both)
    return found if binary.is_many else [(_key(binary, labels), value) for labels, value in found]


def _key(binary: Binary, labels: Labels) -> Labels:
    return _only(labels, binary.on) if binary.on else labels


def _sets(binary: Binary, left: Vector, right: Vector) -> Vector:
    ours, theirs = ({_key(binary, labels) for labels, _ in side} for side in (left, right))
    if binary.op == "or":
        return [*left, *((labels, value) for labels, value in right if _key(binary, labels) not in ours)]
    return [(labels, value) for labels, value in left if (_key(binary, labels) in theirs) == (binary.op == "and")]


def _combined(op: str, both: Sequence[tuple[Labels, float, float]]) -> Vector:
    if op in COMPARE:
        return [(labels, left) for labels, left, right in both if COMPARE[op](left, right)]
    return [(labels, COMPUTE[op](left, right)) for labels, left, right in both]
