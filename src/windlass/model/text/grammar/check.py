"""Checks a finished answer against its JSON Schema (draft 2020-12): mainly the keywords that a grammar cannot enforce.

Patterns and formats are not checked here: a client's regular expression may take for ever, and the grammar has enforced those that
it can. References to other documents are not followed. Work is bounded; where the answer is not certain, it says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from windlass.model.text.grammar.schema import UNENFORCED, enforceable

Verdict = Literal["valid", "invalid", "unknown"]
MAX_STEPS = 100_000
MAX_DEPTH = 64


class _Unknown(Exception):
    """It cannot be decided."""


def check_answer(text: str, schema: Any) -> Verdict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "invalid"
    checker = _Checker(schema)
    try:
        is_valid = checker.is_valid(value, schema, 0)
    except (_Unknown, RecursionError):
        return "unknown"
    if not is_valid:
        return "invalid"
    return "unknown" if checker.skipped else "valid"


class _Checker:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._num_beyond = 0
        """Keywords around that the grammar knows nothing of, and so of what is in them."""
        self.is_fuzzy = False
        """What is said of the present schema rests on the grammar."""
        self.skipped = False
        """Something was left out: a pattern or format that the grammar does not enforce either, a property that is known by a pattern."""

    def is_valid(self, value: Any, schema: Any, depth: int) -> bool:
        self._steps += 1
        if self._steps > MAX_STEPS or depth > MAX_DEPTH:
            raise _Unknown
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            return True
        given = cast(Mapping[str, Any], schema)
        return all(self._keyword(key, expected, value, given, depth) for key, expected in given.items() if key in KEYWORDS)

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

    def resolve(self, reference: str) -> Any:
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


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True) if not _is_number(value) else repr(float(value))


def _of(kind: type, check: Check) -> Check:
    """Keywords say nothing about values of other types."""
    return lambda checker, expected, value, schema, depth: (
        not isinstance(value, kind) or check(checker, expected, value, schema, depth)
    )


def _number(check: Callable[[Any, Any], bool]) -> Check:
    return lambda checker, expected, value, schema, depth: not _is_number(value) or check(value, expected)


def _type(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return any(_TYPES[kind](value) for kind in ([expected] if isinstance(expected, str) else expected))


def _properties(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return all(checker.is_valid(value[key], inner, depth) for key, inner in expected.items() if key in value)


def _additional(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    if "patternProperties" in schema:
        return True
    return all(checker.is_valid(item, expected, depth) for key, item in value.items() if key not in schema.get("properties", {}))


def _patterned(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """Which of them a property matches is not looked at."""
    return not value or checker.trust(all(key in schema.get("properties", {}) for key in value))


def _items(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    if isinstance(expected, list):
        pairs = zip(value, cast(list[Any], expected), strict=False)
        return all(checker.is_valid(item, inner, depth) for item, inner in pairs)
    return all(checker.is_valid(item, expected, depth) for item in value[len(schema.get("prefixItems", ())) :])


def _prefix(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return all(checker.is_valid(item, inner, depth) for item, inner in zip(value, expected, strict=False))


def _contains(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    count = sum(checker.is_valid(item, expected, depth) for item in value)
    return schema.get("minContains", 1) <= count <= schema.get("maxContains", len(value))


def _unique(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return not expected or len(set(map(_canonical, value))) == len(value)


def _condition(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    chosen = "then" if checker.is_valid(value, expected, depth) else "else"
    return chosen not in schema or checker.is_valid(value, schema[chosen], depth)


def _dependent(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """dependentRequired, dependentSchemas, and the older keyword for both."""
    for key, needs in expected.items():
        if key not in value:
            continue
        if isinstance(needs, list):
            if not all(name in value for name in cast(Sequence[Any], needs)):
                return False
        elif not checker.is_valid(value, needs, depth):
            return False
    return True


def _names(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    return all(checker.is_valid(name, expected, depth) for name in value)


def _skip(checker: _Checker, expected: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
    """Enforced by the grammar, or not at all."""
    given = {key: schema[key] for key in ("pattern", "format") if key in schema}
    return checker.trust(not enforceable(given).left_out)


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
    "const": lambda checker, expected, value, schema, depth: _canonical(value) == _canonical(expected),
    "enum": lambda checker, expected, value, schema, depth: _canonical(value) in map(_canonical, expected),
    "$ref": lambda checker, expected, value, schema, depth: checker.is_valid(value, checker.resolve(expected), depth),
    "allOf": _every,
    "anyOf": _any,
    "oneOf": _one,
    "not": lambda checker, expected, value, schema, depth: not checker.is_valid(value, expected, depth),
    "if": _condition,
    "properties": _of(dict, _properties),
    "additionalProperties": _of(dict, _additional),
    "patternProperties": _of(dict, _patterned),
    "required": _of(dict, lambda checker, expected, value, schema, depth: all(key in value for key in expected)),
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
