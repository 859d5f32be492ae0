"""A tree and the samples of a history -> a vector, as Prometheus would compute it at that time."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

from windlass.core.metrics.exposition import Labels
from windlass.errors import BadInput
from windlass.tasks.observe.promql.functions import AGGREGATE, OVER_TIME, Points, histogram_quantile, line, quantile
from windlass.tasks.observe.promql.tree import Aggregation, Binary, Call, Expression, Matcher, Number, Selector, Vector

LOOKBACK_SECONDS = 300.0
"""How old the newest sample of a series may be (Prometheus' --query.lookback-delta)."""
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: (
        left / right if right else math.nan if not left or math.isnan(left) else math.copysign(math.inf, left)
    ),
    "%": lambda left, right: math.fmod(left, right) if right else math.nan,
}
PER_VALUE: Mapping[str, Callable[[float], float]] = {"abs": abs, "floor": math.floor, "ceil": math.ceil}


class Samples(Protocol):
    """Where the samples are."""

    def names(self, name: str) -> Sequence[Labels]:
        """The labels of every series of that name."""
        ...

    def points(self, name: str, labels: Labels, start: float, end: float) -> Points:
        """After `start`, up to and with `end`. A series that ended has no points behind its end."""
        ...

    def latest(self, name: str, labels: Labels, start: float, end: float) -> float | None:
        """The last value in that time; None if there is none, or the series has ended since."""
        ...


def evaluate(expression: Expression, samples: Samples, at: float) -> Vector:
    found = _Evaluation(samples, at).value(expression)
    return found if isinstance(found, list) else [((), found)]


class _Evaluation:
    def __init__(self, samples: Samples, at: float) -> None:
        self._samples, self._at = samples, at

    def value(self, expression: Expression) -> Vector | float:
        match expression:
            case Number():
                return expression.value
            case Selector():
                return self._instant(expression)
            case Call():
                return self._call(expression)
            case Aggregation():
                return self._aggregate(expression)
            case Binary():
                return self._binary(expression)

    def vector(self, expression: Expression) -> Vector:
        found = self.value(expression)
        if not isinstance(found, list):
            raise BadInput("a number stands where the query needs series")
        return found

    def scalar(self, expression: Expression) -> float:
        found = self.value(expression)
        if isinstance(found, list):
            raise BadInput("series stand where the query needs a number")
        return found

    # --- selectors

    def _series(self, selector: Selector) -> list[Labels]:
        return [labels for labels in self._samples.names(selector.name) if _matches(labels, selector.matchers)]

    def _instant(self, selector: Selector) -> Vector:
        if selector.range_seconds:
            raise BadInput(f"{selector.name}[...] needs a function such as rate")
        end = self._at - selector.offset_seconds
        found: Vector = []
        for labels in self._series(selector):
            value = self._samples.latest(selector.name, labels, end - LOOKBACK_SECONDS, end)
            if value is not None:
                found.append((labels, value))
        return found

    def _ranges(self, selector: Expression) -> list[tuple[Labels, Points, float, float]]:
        if not isinstance(selector, Selector) or not selector.range_seconds:
            raise BadInput("this function needs a range, such as metric[5m]")
        end = self._at - selector.offset_seconds
        start = end - selector.range_seconds
        return [
            (labels, self._samples.points(selector.name, labels, start, end), start, end) for labels in self._series(selector)
        ]

    # --- functions

    def _call(self, call: Call) -> Vector | float:
        name, arguments = call.function, call.arguments
        if name in OVER_TIME:
            over = OVER_TIME[name]
            found = [(labels, over(points, start, end)) for labels, points, start, end in self._ranges(arguments[0])]
            return [(labels, value) for labels, value in found if value is not None]
        if name in PER_VALUE:
            return [(labels, PER_VALUE[name](value)) for labels, value in self.vector(arguments[0])]
        match name:
            case "time":
                return self._at
            case "vector":
                return [((), self.scalar(arguments[0]))]
            case "scalar":
                only = self.vector(arguments[0])
                return only[0][1] if len(only) == 1 else math.nan
            case "clamp_min":
                least = self.scalar(arguments[1])
                return [(labels, max(value, least)) for labels, value in self.vector(arguments[0])]
            case "clamp_max":
                most = self.scalar(arguments[1])
                return [(labels, min(value, most)) for labels, value in self.vector(arguments[0])]
            case "histogram_quantile":
                return histogram_quantile(self.scalar(arguments[0]), self.vector(arguments[1]))
            case "quantile_over_time":
                share = self.scalar(arguments[0])
                return [
                    (labels, quantile(share, [value for _, value in points]))
                    for labels, points, _, _ in self._ranges(arguments[1])
                    if points
                ]
            case "predict_linear":
                return self._predicted(arguments[0], self.scalar(arguments[1]))
            case "absent":
                return self._absent(arguments[0], bool(self.vector(arguments[0])))
            case "absent_over_time":
                return self._absent(arguments[0], any(points for _, points, _, _ in self._ranges(arguments[0])))
            case _:
                raise BadInput(f"the function {name} is not supported here; Prometheus has it")

    def _predicted(self, selector: Expression, seconds: float) -> Vector:
        found: Vector = []
        for labels, points, _, end in self._ranges(selector):
            fitted = line(points, end)
            if fitted is not None:
                found.append((labels, fitted[1] + fitted[0] * seconds))
        return found

    def _absent(self, selector: Expression, is_there: bool) -> Vector:
        if is_there:
            return []
        matchers = selector.matchers if isinstance(selector, Selector) else ()
        return [(tuple(sorted((one.label, one.value) for one in matchers if one.op == "=")), 1.0)]

    # --- aggregations

    def _aggregate(self, wanted: Aggregation) -> Vector:
        groups: dict[Labels, list[tuple[Labels, float]]] = {}
        for labels, value in self.vector(wanted.over):
            groups.setdefault(_kept(labels, wanted.labels, not wanted.is_without), []).append((labels, value))
        if wanted.op in ("topk", "bottomk"):
            return self._top(wanted, groups)
        if wanted.op == "quantile":
            share = self.scalar(wanted.parameter or Number(value=0.5))
            return [(labels, quantile(share, [value for _, value in found])) for labels, found in groups.items()]
        combine = AGGREGATE[wanted.op]
        return [(labels, combine([value for _, value in found])) for labels, found in groups.items()]

    def _top(self, wanted: Aggregation, groups: Mapping[Labels, Vector]) -> Vector:
        count = int(self.scalar(wanted.parameter or Number(value=1)))
        is_top = wanted.op == "topk"
        return [one for found in groups.values() for one in sorted(found, key=lambda pair: pair[1], reverse=is_top)[:count]]

    # --- binary operators

    def _binary(self, binary: Binary) -> Vector | float:
        left, right, op = self.value(binary.left), self.value(binary.right), binary.op
        if op in ("and", "or", "unless"):
            if not isinstance(left, list) or not isinstance(right, list):
                raise BadInput(f"{op} is between series")
            return _sets(binary, left, right)
        if isinstance(left, list) and isinstance(right, list):
            return _matched(binary, left, right)
        if isinstance(left, list):
            assert not isinstance(right, list)
            return _each(binary, [(labels, value, right) for labels, value in left], is_left=True)
        if isinstance(right, list):
            return _each(binary, [(labels, left, value) for labels, value in right], is_left=False)
        return float(COMPARE[op](left, right)) if op in COMPARE else ARITHMETIC[op](left, right)


def _each(binary: Binary, pairs: Sequence[tuple[Labels, float, float]], is_left: bool) -> Vector:
    """A comparison keeps the value of the series; with `bool`, it is 0 or 1."""
    op = binary.op
    if op in ARITHMETIC:
        return [(labels, ARITHMETIC[op](left, right)) for labels, left, right in pairs]
    if binary.is_bool:
        return [(labels, float(COMPARE[op](left, right))) for labels, left, right in pairs]
    return [(labels, left if is_left else right) for labels, left, right in pairs if COMPARE[op](left, right)]


def _key(binary: Binary, labels: Labels) -> Labels:
    return labels if binary.labels is None else _kept(labels, binary.labels, binary.is_on)


def _sets(binary: Binary, left: Vector, right: Vector) -> Vector:
    if binary.op == "or":
        have = {_key(binary, labels) for labels, _ in left}
        return [*left, *((labels, value) for labels, value in right if _key(binary, labels) not in have)]
    others = {_key(binary, labels) for labels, _ in right}
    return [(labels, value) for labels, value in left if (_key(binary, labels) in others) == (binary.op == "and")]


def _matched(binary: Binary, left: Vector, right: Vector) -> Vector:
    if binary.one_side == "group_right":
        table = {_key(binary, labels): value for labels, value in left}
        pairs = [(labels, table[key], value) for labels, value in right if (key := _key(binary, labels)) in table]
        return _each(binary, pairs, is_left=True)
    table = {_key(binary, labels): value for labels, value in right}
    pairs = [(labels, value, table[key]) for labels, value in left if (key := _key(binary, labels)) in table]
    found = _each(binary, pairs, is_left=True)
    if binary.labels is None or binary.one_side:
        return found
    return [(_key(binary, labels), value) for labels, value in found]


def _kept(labels: Labels, names: Sequence[str], is_by: bool) -> Labels:
    return tuple(pair for pair in labels if (pair[0] in names) == is_by)


def _matches(labels: Labels, matchers: Sequence[Matcher]) -> bool:
    have = dict(labels) if matchers else {}
    return all(_fits(have.get(one.label, ""), one) for one in matchers)


def _fits(value: str, matcher: Matcher) -> bool:
    if matcher.op in ("=", "!="):
        return (value == matcher.value) == (matcher.op == "=")
    return (_pattern(matcher.value).fullmatch(value) is not None) == (matcher.op == "=~")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)
