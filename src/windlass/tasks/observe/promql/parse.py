"""Text to tree. What is not supported (subqueries, `@`, `^`, regular expressions beyond Python's) is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from windlass.errors import BadInput
from windlass.tasks.observe.promql.tree import Aggregation, Binary, Call, Expression, Matcher, Number, Selector

AGGREGATIONS = frozenset("sum min max avg count quantile topk bottomk stddev".split())
WITH_PARAMETER = frozenset({"quantile", "topk", "bottomk"})
LEVELS = (("or",), ("and", "unless"), ("==", "!=", "<=", "<", ">=", ">"), ("+", "-"), ("*", "/", "%"))
"""Binary operators, loosest first."""
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*\s*)*(?:
    (?P<duration>(?:\d+(?:ms|[smhdw]))+)(?![\w.])
    |(?P<number>(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|[Ii]nf\b|NaN\b))
    |(?P<word>[A-Za-z_:][\w:]*)
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<op>==|!=|<=|>=|=~|!~|[-+*/%<>=(){}\[\],])
    )""",
    re.VERBOSE,
)


class Token(NamedTuple):
    kind: str
    text: str


def parse(query: str) -> Expression:
    parser = _Parser(query, _tokens(query))
    found = parser.binary(0)
    parser.end()
    return found


def seconds_of(duration: str) -> float:
    """`1h30m` -> 5400."""
    return sum(int(count) * UNITS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdw])", duration))


def _tokens(query: str) -> list[Token]:
    found: list[Token] = []
    at, end = 0, len(query.rstrip())
    while at < end:
        match = _TOKEN.match(query, at)
        if match is None or match.lastgroup is None:
            raise BadInput(f"cannot read the query at {query[at : at + 20]!r}: {query}")
        found.append(Token(match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


class _Parser:
    def __init__(self, query: str, tokens: Sequence[Token]) -> None:
        self._query, self._tokens, self._at = query, tokens, 0

    # --- tokens

    @property
    def _next(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _take(self) -> Token:
        if self._at >= len(self._tokens):
            raise BadInput(f"the query ends too early: {self._query}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, text: str) -> bool:
        if self._next == text:
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise BadInput(f"expected {text!r} before {self._next!r} in the query {self._query}")

    def end(self) -> None:
        if self._at < len(self._tokens):
            raise BadInput(f"{self._next!r} is not supported here: {self._query}")

    # --- expressions

    def binary(self, level: int) -> Expression:
        if level == len(LEVELS):
            return self._unary()
        left = self.binary(level + 1)
        while self._next in LEVELS[level]:
            left = self._joined(self._take().text, left, level)
        return left

    def _joined(self, op: str, left: Expression, level: int) -> Expression:
        is_bool = self._accept("bool")
        labels, is_on, side = None, False, ""
        if self._next in ("on", "ignoring"):
            is_on = self._take().text == "on"
            labels, side = self._names(), self._side()
        right = self.binary(level + 1)
        one_side = cast(Literal["", "group_left", "group_right"], side)
        return Binary(op=op, left=left, right=right, is_bool=is_bool, labels=labels, is_on=is_on, one_side=one_side)

    def _side(self) -> str:
        side = self._next
        if side not in ("group_left", "group_right"):
            return ""
        self._take()
        _ = self._names() if self._next == "(" else ()
        return side

    def _unary(self) -> Expression:
        if self._accept("-"):
            return Binary(op="*", left=Number(value=-1.0), right=self._unary())
        if self._accept("("):
            inside = self.binary(0)
            self._expect(")")
            return inside
        token = self._take()
        if token.kind == "number":
            return Number(value=float(token.text))
        if token.kind == "word":
            return self._word(token.text)
        if token.text == "{":
            self._at -= 1
            return self._selector("")
        raise BadInput(f"{token.text!r} is not supported here: {self._query}")

    def _word(self, word: str) -> Expression:
        if word in AGGREGATIONS and self._next in ("(", "by", "without"):
            return self._aggregation(word)
        if self._next == "(":
            return Call(function=word, arguments=self._arguments())
        return self._selector(word)

    def _arguments(self) -> tuple[Expression, ...]:
        self._expect("(")
        found: list[Expression] = []
        while not self._accept(")"):
            text = self._tokens[self._at] if self._at < len(self._tokens) else None
            if text is not None and text.kind == "text":  # of label_replace, which we have not
                raise BadInput(f"text arguments are not supported: {self._query}")
            found.append(self.binary(0))
            if self._next != ")":
                self._expect(",")
        return tuple(found)

    def _aggregation(self, op: str) -> Expression:
        labels, is_without = self._grouping()
        arguments = self._arguments()
        if not labels and not is_without:
            labels, is_without = self._grouping()
        parameter = arguments[0] if op in WITH_PARAMETER else None
        return Aggregation(op=op, over=arguments[-1], parameter=parameter, labels=labels, is_without=is_without)

    def _grouping(self) -> tuple[tuple[str, ...], bool]:
        if self._next not in ("by", "without"):
            return (), False
        is_without = self._take().text == "without"
        return self._names(), is_without

    def _names(self) -> tuple[str, ...]:
        self._expect("(")
        found: list[str] = []
        while not self._accept(")"):
            found.append(self._take().text)
            self._accept(",")
        return tuple(found)

    def _selector(self, name: str) -> Expression:
        matchers = self._matchers() if self._accept("{") else ()
        range_seconds = offset = 0.0
        if self._accept("["):
            range_seconds = self._duration()
            self._expect("]")
        if self._accept("offset"):
            offset = self._duration()
        return Selector(name=name, matchers=matchers, range_seconds=range_seconds, offset_seconds=offset)

    def _matchers(self) -> tuple[Matcher, ...]:
        found: list[Matcher] = []
        while not self._accept("}"):
            label, op, value = self._take().text, self._take().text, self._take().text
            if op not in ("=", "!=", "=~", "!~"):
                raise BadInput(f"{op!r} does not compare labels: {self._query}")
            plain = re.sub(r"\\(.)", r"\1", value[1:-1])
            found.append(Matcher(label=label, op=op, value=plain))
            self._accept(",")
        return tuple(found)

    def _duration(self) -> float:
        token = self._take()
        if token.kind != "duration":
            raise BadInput(f"{token.text!r} is no duration (30s, 5m, 1h30m): {self._query}")
        return seconds_of(token.text)
