"""A condition as the text that Prometheus evaluates."""

from __future__ import annotations

from windlass.core.metrics.exposition import escaped, number
from windlass.tasks.observe.conditions.condition import Binary, Condition, Grouped, Latest, Mapped, Now, Operand, Windowed

UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
SETS = ("and", "or", "unless")
LEVELS = (("or",), ("and", "unless"), ("==", "!=", "<", "<=", ">"), ("+", "-"), ("*", "/"))
"""Loosest first (prometheus.io/docs/prometheus/latest/querying/operators); each from left to right."""


def promql(condition: Operand) -> str:
    return _text(condition) if isinstance(condition, Condition) else f"vector({_text(condition)})"


def _text(condition: Operand) -> str:
    match condition:
        case Latest():
            return _selector(condition)
        case Windowed():
            return _windowed(condition)
        case Grouped():
            by = f" by ({', '.join(condition.by)}) " if condition.by else ""
            return f"{condition.op}{by}({'1, ' if condition.op == 'bottomk' else ''}{_text(condition.of)})"
        case Mapped():
            least = f", {number(condition.least)}" if condition.function == "clamp_min" else ""
            return f"{condition.function}({_text(condition.of)}{least})"
        case Now():
            return "time()"
        case Binary():
            return _binary(condition)
        case float() | int():
            return number(condition)
        case _:
            raise TypeError(condition)


def _selector(series: Latest, window: str = "") -> str:
    where = ", ".join(f'{one.label}{one.op}"{escaped(one.value)}"' for one in series.where)
    ago = f" offset {_length(series.ago)}" if series.ago else ""
    return f"{series.name}{f'{{{where}}}' if where else ''}{window}{ago}"


def _windowed(window: Windowed) -> str:
    series = _selector(window.series, f"[{_length(window.seconds)}]")
    match window.function:
        case "quantile_over_time":
            return f"{window.function}({number(window.parameter)}, {series})"
        case "predict_linear":
            return f"{window.function}({series}, {number(window.parameter)})"
        case _:
            return f"{window.function}({series})"


def _length(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in UNITS if seconds % size == 0)
    return f"{seconds / size:g}{unit}"


def _binary(binary: Binary) -> str:
    on = f" on ({', '.join(binary.on)})" if binary.on else ""
    many = " group_left ()" if binary.is_many else ""
    return f"{_side(binary, binary.left)} {binary.op}{on}{many} {_side(binary, binary.right)}"


def _side(outer: Binary, side: Operand) -> str:
    """In parentheses where it needs them, or where `and`, `or` and `unless` meet."""
    if not isinstance(side, Binary):
        return _text(side)
    inner_level, outer_level = _level(side), _level(outer)
    is_loose = inner_level < outer_level or (inner_level == outer_level and side is outer.right)
    is_mixed = side.op in SETS and outer.op in SETS and side.op != outer.op
    return f"({_text(side)})" if is_loose or is_mixed else _text(side)


def _level(binary: Binary) -> int:
    return next(level for level, operators in enumerate(LEVELS) if binary.op in operators)
