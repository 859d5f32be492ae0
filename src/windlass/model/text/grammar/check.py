"""Checks a finished answer against its JSON Schema (draft 2020-12): mainly the keywords that a grammar cannot enforce.

Patterns and formats are not checked here: a client's regular expression may take for ever, and the grammar has enforced those that
it can. References to other documents are not followed. Work is bounded; where the answer is not certain, it says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, cast

from windlass.errors import BadInput
from windlass.model.text.grammar.room import OutOfWork, Work
from windlass.model.text.grammar.schema import UNENFORCED, enforceable
from windlass.model.text.grammar.values import Values

Verdict = Literal["valid", "invalid", "unknown"]
MAX_STEPS = 50_000
"""A microsecond or two each: schemas looked at, and names and values gone through, NAMES_PER_STEP at a time."""
NAMES_PER_STEP = 16
MAX_DEPTH = 64


class _Unknown(Exception):
    """It cannot be decided."""


def check_answer(text: str, schema: Any, work: Work | None = None) -> Verdict:
    """`work`: that several answers share."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "invalid"
    checker = _Checker(schema, work or Work(MAX_STEPS))
    try:
        is_valid = checker.is_valid(value, schema, 0)
    except (_Unknown, OutOfWork, BadInput, RecursionError):
        return "unknown"
    if not is_valid:
        return "invalid"
    return "unknown" if checker.skipped else "valid"


class _Checker:
    def __init__(self, root: Any, work: Work) -> None:
        self._root, self._work = root, work
        self.values = Values(work)
        self._references: dict[str, Any] = {}
        self._enforced: dict[int, bool] = {}
        """By the id of a schema: whether the grammar has enforced its pattern and its format."""
        self._num_beyond = 0
        """Keywords around that the grammar knows nothing of, and so of what is in them."""
        self.is_fuzzy = False
        """What is said of the present schema rests on the grammar."""
        self.skipped = False
        """Something was left out: a pattern or format that the grammar does not enforce either, a property that is known by a pattern."""

    def is_valid(self, value: Any, schema: Any, depth: int) -> bool:
        self._work.spend(1)
        if depth > MAX_DEPTH:
            raise _Unknown
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            return True
        given = self.through(cast(Mapping[str, Any], schema))
        return all(self._keyword(key, expected, value, given, depth) for key, expected in given.items() if key in KEYWORDS)

    def through(self, names: Any) -> Any:
        """What is gone through: it counts first."""
        self._work.spend(len(names) // NAMES_PER_STEP)
        return names

    def _keyword(self, key: str, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
        self._num_beyond += key in UNENFORCED
        try:
            return KEYWORDS[key](self, expected, value, schema, depth + 1)
        except (TypeError, LookupError, ValueError, ArithmeticError, AttributeError):
            raise _Unknown from None  # a malformed schema
        finally:
            self._num_beyond -= key in UNENFORCED

    def trust(self, is_enforced: bool) -> bool:
        """Something that is not looked at: the grammar has enforced it, or it is not known."""
        if self._num_beyond:
            raise _Unknown
        self.is_fuzzy = True
        self.skipped = self.skipped or not is_enforced
        return True

    def is_enforced(self, schema: Mapping[str, Any]) -> bool:
        """Its pattern and its format, by the grammar."""
        found = self._enforced.get(id(schema))
        if found is None:
            given = {key: schema[key] for key in ("pattern", "format") if key in schema}
            found = self._enforced[id(schema)] = not enforceable(given).left_out
        return found

    def resolve(self, reference: str) -> Any:
        if reference not in self._references:
            self._references[reference] = self._resolved(reference)
        return self._references[reference]

    def _resolved(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise _Unknown
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found[int(name) if isinstance(found, list) else name]
        return found


Check = Callable[[_Checker, Any, Any, Mapping[str, Any], int], bool]
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _of(kind: type, check: Check) -> Check:
    """Keywords say nothing about values of other types."""
    return lambda checker, expected, value, schema, depth: (
        not isinstance(value, kind) or check(checker, expected, value, schema, depth)
    )


def _number(check: Callable[[Any, Any], bool]) -> Check:
    return lambda checker, expected, value, schema, depth: not _is_number(value) or check(value, expected)


def _type(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return any(_TYPES[kind](value) for kind in ([expected] if isinstance(expected, str) else checker.through(expected)))


def _properties(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    given = checker.through(expected).items()
    return all(checker.is_valid(value[key], inner, depth) for key, inner in given if key in value)


def _known(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    known = schema.get("properties", {})
    if not isinstance(known, Mapping):
        raise _Unknown
    return cast(Mapping[str, Any], known)


def _additional(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    if "patternProperties" in schema:
        return True
    known = _known(schema)
    return all(checker.is_valid(item, expected, depth) for key, item in checker.through(value).items() if key not in known)


def _patterned(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """Which of them a property matches is not looked at."""
    return not value or checker.trust(_known(schema).keys() >= checker.through(value).keys())


def _items(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    if isinstance(expected, list):
        pairs = zip(value, cast(list[Any], expected), strict=False)
        return all(checker.is_valid(item, inner, depth) for item, inner in pairs)
    first = len(schema.get("prefixItems", ()))
    return all(checker.is_valid(item, expected, depth) for item in islice(checker.through(value), first, None))


def _prefix(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return all(checker.is_valid(item, inner, depth) for item, inner in zip(value, expected, strict=False))


def _contains(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    count = sum(checker.is_valid(item, expected, depth) for item in value)
    return schema.get("minContains", 1) <= count <= schema.get("maxContains", len(value))


def _unique(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return not expected or len(set(map(checker.values.text, value))) == len(value)


def _condition(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    chosen = "then" if checker.is_valid(value, expected, depth) else "else"
    return chosen not in schema or checker.is_valid(value, schema[chosen], depth)


def _dependent(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """dependentRequired, dependentSchemas, and the older keyword for both."""
    for key, needs in checker.through(expected).items():
        if key not in value:
            continue
        if isinstance(needs, list):
            if not all(name in value for name in cast(Sequence[Any], checker.through(needs))):
                return False
        elif not checker.is_valid(value, needs, depth):
            return False
    return True


def _names(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return all(checker.is_valid(name, expected, depth) for name in value)


def _skip(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """Enforced by the grammar, or not at all."""
    return checker.trust(checker.is_enforced(schema))


def _unsure(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return checker.trust(False)


def _every(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return all(checker.is_valid(value, inner, depth) for inner in expected)


def _any(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return any(checker.is_valid(value, inner, depth) for inner in expected)


def _one(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    num_sure = num_fuzzy = 0
    before = checker.is_fuzzy
    for inner in expected:
        checker.is_fuzzy = False
        if checker.is_valid(value, inner, depth):
            num_sure, num_fuzzy = num_sure + (not checker.is_fuzzy), num_fuzzy + checker.is_fuzzy
    checker.is_fuzzy = before or num_fuzzy > 0
    if num_sure < 2 <= num_sure + num_fuzzy:
        raise _Unknown
    return num_sure + num_fuzzy == 1


KEYWORDS: dict[str, Check] = {
    "type": _type,
    "const": lambda checker, expected, value, schema, depth: checker.values.text(value) == checker.values.text(expected),
    "enum": lambda checker, expected, value, schema, depth: checker.values.text(value) in checker.values.all_of(expected),
    "$ref": lambda checker, expected, value, schema, depth: checker.is_valid(value, checker.resolve(expected), depth),
    "allOf": _every,
    "anyOf": _any,
    "oneOf": _one,
    "not": lambda checker, expected, value, schema, depth: not checker.is_valid(value, expected, depth),
    "if": _condition,
    "properties": _of(dict, _properties),
    "additionalProperties": _of(dict, _additional),
    "patternProperties": _of(dict, _patterned),
    "required": _of(dict, lambda checker, expected, value, schema, depth: all(key in value for key in checker.through(expected))),
    "minProperties": _of(dict, lambda checker, expected, value, schema, depth: len(value) >= expected),
    "maxProperties": _of(dict, lambda checker, expected, value, schema, depth: len(value) <= expected),
    "dependentRequired": _of(dict, _dependent),
    "dependentSchemas": _of(dict, _dependent),
    "dependencies": _of(dict, _dependent),
    "propertyNames": _of(dict, _names),
    "items": _of(list, _items),
    "prefixItems": _of(list, _prefix),
    "contains": _of(list, _contains),
    "uniqueItems": _of(list, _unique),
    "minItems": _of(list, lambda checker, expected, value, schema, depth: len(value) >= expected),
    "maxItems": _of(list, lambda checker, expected, value, schema, depth: len(value) <= expected),
    "minLength": _of(str, lambda checker, expected, value, schema, depth: len(value) >= expected),
    "maxLength": _of(str, lambda checker, expected, value, schema, depth: len(value) <= expected),
    "minimum": _number(lambda value, bound: value >= bound),
    "maximum": _number(lambda value, bound: value <= bound),
    "exclusiveMinimum": _number(lambda value, bound: value > bound),
    "exclusiveMaximum": _number(lambda value, bound: value < bound),
    "pattern": _of(str, _skip),
    "format": _of(str, _skip),
    "unevaluatedProperties": _of(dict, _unsure),
    "unevaluatedItems": _of(list, _unsure),
    "$dynamicRef": _unsure,
}
