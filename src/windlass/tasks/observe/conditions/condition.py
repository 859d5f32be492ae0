"""What an alert waits for, a recording keeps and a chart shows. `evaluate.py` computes it, `promql.py` writes it; both mean the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from windlass.core.metrics.metric import Metric

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
Function = Literal[
    "rate", "increase", "changes", "deriv", "avg_over_time", "min_over_time", "count_over_time", "quantile_over_time", "predict_linear"
]  # fmt: skip
Operator = Literal["+", "-", "*", "/", "==", "!=", "<", "<=", ">", "and", "or", "unless"]


class Where(NamedTuple):
    """What a label must be; `=~` and `!~`: a pattern for all of it."""

    label: str
    op: Literal["=", "!=", "=~", "!~"]
    value: str


class Condition:
    """Series with values, as in PromQL: a comparison leaves the series for which it holds, and keeps the value on its left."""

    def __add__(self, other: Operand) -> Binary:
        return Binary(self, "+", other)

    def __sub__(self, other: Operand) -> Binary:
        return Binary(self, "-", other)

    def __rsub__(self, other: float) -> Binary:
        return Binary(other, "-", self)

    def __rmul__(self, other: float) -> Binary:
        return Binary(other, "*", self)

    def __truediv__(self, other: Operand) -> Binary:
        return Binary(self, "/", other)

    def __lt__(self, other: Operand) -> Binary:
        return Binary(self, "<", other)

    def __le__(self, other: Operand) -> Binary:
        return Binary(self, "<=", other)

    def __gt__(self, other: Operand) -> Binary:
        return Binary(self, ">", other)

    def equals(self, other: float) -> Binary:
        return Binary(self, "==", other)

    def also(self, other: Condition, on: tuple[str, ...] = ()) -> Binary:
        return Binary(self, "and", other, on)

    def or_else(self, other: Condition, on: tuple[str, ...] = ()) -> Binary:
        return Binary(self, "or", other, on)

    def unless(self, other: Condition) -> Binary:
        return Binary(self, "unless", other)

    def lasting(self, seconds: float) -> Lasting:
        return Lasting(self, seconds)


Operand = Condition | float


class Lasting(NamedTuple):
    """An alert waits that long before it fires."""

    condition: Condition
    seconds: float


@dataclass(frozen=True)
class Latest(Condition):
    """The newest value of every series of that name."""

    name: str
    where: tuple[Where, ...] = ()
    ago: float = 0.0


@dataclass(frozen=True)
class Windowed(Condition):
    """A function of all values in a window of time."""

    function: Function
    series: Latest
    seconds: float
    parameter: float = 0.0
    """quantile_over_time: which; predict_linear: how many seconds ahead."""


@dataclass(frozen=True)
class Grouped(Condition):
    """One value of all series that are alike in these labels; `bottomk`: the series with the least."""

    op: Literal["sum", "min", "max", "bottomk"]
    of: Condition
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mapped(Condition):
    """A function of every value."""

    function: Literal["abs", "clamp_min"]
    of: Condition
    least: float = 0.0


@dataclass(frozen=True)
class Now(Condition):
    """The time, as a number."""


@dataclass(frozen=True)
class Binary(Condition):
    left: Operand
    op: Operator
    right: Operand
    on: tuple[str, ...] = ()
    """Labels by which series of both sides belong together; empty: all."""
    is_many: bool = False
    """Several series on the left belong to one on the right."""


def latest(metric: Metric | str, *where: Where, ago: float = 0.0) -> Latest:
    return Latest(str(metric), where, ago)


def over(
    function: Function, metric: Metric | str, seconds: float, *where: Where, ago: float = 0.0, parameter: float = 0.0
) -> Windowed:
    return Windowed(function, latest(metric, *where, ago=ago), seconds, parameter)


def series_read(condition: Operand) -> list[tuple[str, float]]:
    """The name of every series that it reads, and how far back."""
    match condition:
        case Latest():
            return [(condition.name, condition.ago)]
        case Windowed():
            return [(condition.series.name, condition.series.ago + condition.seconds)]
        case Grouped() | Mapped():
            return series_read(condition.of)
        case Binary():
            return [*series_read(condition.left), *series_read(condition.right)]
        case _:
            return []
