"""What a query consists of, and what evaluating it gives."""

from __future__ import annotations

from typing import Literal

from windlass.core.metrics.exposition import Labels
from windlass.core.model import Frozen

Vector = list[tuple[Labels, float]]


class Number(Frozen):
    value: float


class Matcher(Frozen):
    label: str
    op: Literal["=", "!=", "=~", "!~"]
    value: str


class Selector(Frozen):
    """`name{label="value"}[range] offset d`; `range_seconds` 0: the value now."""

    name: str
    matchers: tuple[Matcher, ...] = ()
    range_seconds: float = 0.0
    offset_seconds: float = 0.0


class Call(Frozen):
    function: str
    arguments: tuple[Expression, ...] = ()


class Aggregation(Frozen):
    op: str
    over: Expression
    parameter: Expression | None = None
    labels: tuple[str, ...] = ()
    is_without: bool = False


class Binary(Frozen):
    op: str
    left: Expression
    right: Expression
    is_bool: bool = False
    labels: tuple[str, ...] | None = None
    """Of `on` or `ignoring`; None: all labels must be equal."""
    is_on: bool = False
    one_side: Literal["", "group_left", "group_right"] = ""


Expression = Number | Selector | Call | Aggregation | Binary


def selectors(expression: Expression) -> list[Selector]:
    """Every selector of a query."""
    match expression:
        case Selector():
            return [expression]
        case Call():
            return [found for one in expression.arguments for found in selectors(one)]
        case Aggregation():
            return selectors(expression.over)
        case Binary():
            return [*selectors(expression.left), *selectors(expression.right)]
        case _:
            return []
