"""Whether the schemas of a `oneOf` exclude each other, so that `anyOf`, which a grammar can enforce, means the same.

They do if they allow other types or values, or need a property that the other has with other values (a tag, as discriminated unions have it) or
does not allow. Patterns, lengths and ranges are not looked at: then it says no, which is always safe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, cast

MAX_OPTIONS = 32
"""Compared in pairs. More of them need a tag in common."""
MAX_COMPARED = 5_000
"""Pairs of one schema."""
MAX_DEPTH = 4
MAX_ALTERNATIVES = 16
"""Of an option that is a union itself."""
MAX_MEMBERS = 16
KINDS = {name: frozenset((name,)) for name in ("null", "boolean", "integer", "string", "array", "object")} | {
    "number": frozenset(("integer", "fraction"))
}
OBJECT = KINDS["object"]
ALL_KINDS = frozenset[str]().union(*KINDS.values())
Members = tuple[Mapping[str, Any], ...]
"""Schemas that hold together."""


class Exclusion:
    def __init__(self, resolve: Callable[[Any], dict[str, Any] | None]) -> None:
        """`resolve`: what a `$ref` leads to."""
        self._resolve, self._left = resolve, MAX_COMPARED

    def is_exclusive(self, schema: Mapping[str, Any]) -> bool:
        """`schema`: with `oneOf`, and with what else holds for all of its options."""
        options: Any = schema["oneOf"]
        if not isinstance(options, list) or len(cast(list[Any], options)) < 2:
            return True
        beside = {key: value for key, value in schema.items() if key not in ("oneOf", "anyOf")}
        given = [self._alternatives([beside, option]) for option in cast(list[Any], options)]
        if _have_tag([alternatives[0] for alternatives in given if len(alternatives) == 1], len(given)):
            return True
        return len(given) <= MAX_OPTIONS and all(self._exclude(one, other, 0) for one, other in combinations(given, 2))

    def _exclude(self, one: list[Members], other: list[Members], depth: int) -> bool:
        return all(self._members_exclude(first, second, depth) for first in one for second in other)

    def _members_exclude(self, one: Members, other: Members, depth: int) -> bool:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            return False
        kinds = _kinds(one) & _kinds(other)
        if not kinds:
            return True
        values, others = _values(one), _values(other)
        if values is not None and others is not None and values.isdisjoint(others):
            return True
        if kinds != OBJECT:
            return False
        needed = _required(one) | _required(other)
        return any(self._property_excludes(name, one, other, depth) for name in sorted(needed))

    def _property_excludes(self, name: str, one: Members, other: Members, depth: int) -> bool:
        if _is_forbidden(name, one) or _is_forbidden(name, other):
            return True
        first, second = _property(name, one), _property(name, other)
        if not first or not second:
            return False
        return self._exclude(self._alternatives(first), self._alternatives(second), depth + 1)

    def _alternatives(self, schemas: Iterable[Any]) -> list[Members]:
        """A union as its alternatives, each with all that holds for it."""
        members: list[Mapping[str, Any]] = []
        unions: list[list[Any]] = []
        waiting = list(schemas)
        while waiting and len(members) < MAX_MEMBERS:
            schema = waiting.pop()
            if not isinstance(schema, Mapping):
                members += [{"enum": []}] if schema is False else []
                continue
            given = cast(Mapping[str, Any], schema)
            members.append(given)
            waiting += [found for found in (self._resolve(given.get("$ref")),) if found is not None]
            waiting += _listed(given.get("allOf"))
            unions += [union for key in ("anyOf", "oneOf") if (union := _listed(given.get(key)))]
        fitting = next((union for union in unions if len(union) <= MAX_ALTERNATIVES), None)
        if fitting is None:
            return [tuple(members)]
        return [(*members, *self._together(option)) for option in fitting]

    def _together(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """It, and what it refers to; a union in it is left alone."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return
            yield cast(Mapping[str, Any], schema)
            schema = self._resolve(cast(Mapping[str, Any], schema).get("$ref"))


def _have_tag(options: list[Members], num_options: int) -> bool:
    """All objects, all with a property that is needed and has other values in each: found without comparing pairs."""
    if not options or len(options) < num_options or any(_kinds(option) != OBJECT for option in options):
        return False
    for name in sorted(_required(options[0])):
        known = [values for option in options if (values := _tag_values(name, option)) is not None]
        if len(known) == len(options) and sum(map(len, known)) == len(frozenset[str]().union(*known)):
            return True
    return False


def _kinds(members: Members) -> frozenset[str]:
    found = ALL_KINDS
    for member in members:
        named = member.get("type")
        names = _listed(named) if isinstance(named, list) else [named]
        if named is not None and all(name in KINDS for name in names if isinstance(name, str)):
            found &= frozenset[str]().union(*(KINDS[name] for name in names if isinstance(name, str)))
    values = _values(members)
    return found if values is None else found & {_kind(json.loads(value)) for value in values}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == value // 1 else "fraction"
    return {type(None): "null", str: "string", list: "array", dict: "object"}[type(value)]


def _values(members: Iterable[Mapping[str, Any]]) -> frozenset[str] | None:
    """In JSON; None: any."""
    found: frozenset[str] | None = None
    for member in members:
        for values in ([member["const"]] if "const" in member else None, _listed(member["enum"]) if "enum" in member else None):
            if values is not None:
                named = frozenset(map(_canonical, values))
                found = named if found is None else found & named
    return found


def _canonical(value: Any) -> str:
    """1 and 1.0 are the same."""
    if not isinstance(value, str):
        value = json.loads(json.dumps(value), parse_float=_number)
    return json.dumps(value, sort_keys=True)


def _number(text: str) -> float | int:
    return int(value) if (value := float(text)).is_integer() else value


def _required(members: Members) -> frozenset[str]:
    return frozenset(name for member in members for name in _listed(member.get("required")) if isinstance(name, str))


def _property(name: str, members: Members) -> list[Any]:
    maps = (member["properties"] for member in members if isinstance(member.get("properties"), Mapping))
    return [cast(Mapping[str, Any], found)[name] for found in maps if name in found]


def _tag_values(name: str, option: Members) -> frozenset[str] | None:
    if name not in _required(option):
        return None
    return _values(cast(Mapping[str, Any], found) for found in _property(name, option) if isinstance(found, Mapping))


def _is_forbidden(name: str, members: Members) -> bool:
    return any(
        member.get("additionalProperties") is False
        and "patternProperties" not in member
        and name not in cast(Mapping[str, Any], member.get("properties") or {})
        for member in members
    )


def _listed(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
