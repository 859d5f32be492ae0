"""Whether the schemas of a `oneOf` exclude each other, so that `anyOf`, which a grammar can enforce, means the same.

They do if they allow other types or values, or need a property that the other has with other values (a tag, as discriminated unions have it) or
does not allow. Patterns, lengths and ranges are not looked at: then it says no, which is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property
from itertools import combinations
from typing import Any, cast

from windlass.model.text.grammar.room import OutOfWork, Work
from windlass.model.text.grammar.values import Values

MAX_OPTIONS = 32
"""Compared in pairs. More of them need a tag in common."""
MAX_WORK = 20_000
"""For one schema: members of options, values and names that are looked at. Half a microsecond each."""
MAX_DEPTH = 4
MAX_ALTERNATIVES = 16
"""Of an option that is a union itself."""
MAX_MEMBERS = 16
KINDS = {name: frozenset((name,)) for name in ("null", "boolean", "integer", "string", "array", "object")} | {
    "number": frozenset(("integer", "fraction"))
}
OBJECT = KINDS["object"]
ALL_KINDS = frozenset[str]().union(*KINDS.values())
NOTHING: Mapping[str, Any] = {"enum": []}


class Exclusion:
    def __init__(self, resolve: Callable[[Any], dict[str, Any] | None]) -> None:
        """`resolve`: what a `$ref` leads to."""
        self._resolve, self._work = resolve, Work(MAX_WORK)
        self._values = Values(self._work)

    def is_exclusive(self, schema: Mapping[str, Any]) -> bool:
        """`schema`: with `oneOf`, and with what else holds for all of its options. No too if it cannot be told with little work."""
        options: Any = schema["oneOf"]
        if not isinstance(options, list) or len(cast(list[Any], options)) < 2:
            return True
        try:
            return self._is_exclusive(schema, cast(list[Any], options))
        except OutOfWork:
            return False

    def _is_exclusive(self, schema: Mapping[str, Any], options: list[Any]) -> bool:
        self._work.spend(len(schema))
        beside = {key: value for key, value in schema.items() if key not in ("oneOf", "anyOf")}
        given = [self._alternatives([beside, option]) for option in options]
        if self._have_tag([alternatives[0] for alternatives in given if len(alternatives) == 1], len(given)):
            return True
        return len(given) <= MAX_OPTIONS and all(self._exclude(one, other, 0) for one, other in combinations(given, 2))

    def _exclude(self, one: list[Members], other: list[Members], depth: int) -> bool:
        return all(self._members_exclude(first, second, depth) for first in one for second in other)

    def _members_exclude(self, one: Members, other: Members, depth: int) -> bool:
        self._work.spend(1)
        if depth > MAX_DEPTH:
            return False
        kinds = one.kinds & other.kinds
        if not kinds:
            return True
        if one.values is not None and other.values is not None and self._are_apart(one.values, other.values):
            return True
        if kinds != OBJECT:
            return False
        self._work.spend(len(one.required) + len(other.required))
        needed = one.required | other.required
        return any(self._property_excludes(name, one, other, depth) for name in sorted(needed))

    def _are_apart(self, one: Set[str], other: Set[str]) -> bool:
        self._work.spend(min(len(one), len(other)))
        return one.isdisjoint(other)

    def _property_excludes(self, name: str, one: Members, other: Members, depth: int) -> bool:
        if one.forbids(name) or other.forbids(name):
            return True
        first, second = one.property(name), other.property(name)
        if not first or not second:
            return False
        return self._exclude(self._alternatives(first), self._alternatives(second), depth + 1)

    def _have_tag(self, options: list[Members], num_options: int) -> bool:
        """All objects, all with a property that is needed and has other values in each: found without comparing pairs."""
        if not options or len(options) < num_options or any(option.kinds != OBJECT for option in options):
            return False
        return any(self._is_tag(name, options) for name in sorted(options[0].required))

    def _is_tag(self, name: str, options: list[Members]) -> bool:
        known = set[str]()
        for option in options:
            values = self._tag_values(name, option)
            if values is None or not self._are_apart(values, known):
                return False
            known |= values
        return True

    def _tag_values(self, name: str, option: Members) -> frozenset[str] | None:
        if name not in option.required:
            return None
        given = [cast(Mapping[str, Any], found) for found in option.property(name) if isinstance(found, Mapping)]
        return self._values.allowed(given)

    def _alternatives(self, schemas: Iterable[Any]) -> list[Members]:
        """A union as its alternatives, each with all that holds for it."""
        members: list[Mapping[str, Any]] = []
        unions: list[list[Any]] = []
        waiting = list(schemas)
        while waiting and len(members) < MAX_MEMBERS:
            self._work.spend(1)
            schema = waiting.pop()
            if not isinstance(schema, Mapping):
                members += [NOTHING] if schema is False else []
                continue
            given = cast(Mapping[str, Any], schema)
            members.append(given)
            waiting += [found for found in (self._resolve(given.get("$ref")),) if found is not None]
            waiting += _listed(given.get("allOf"))[-MAX_MEMBERS:]
            unions += [union for key in ("anyOf", "oneOf") if (union := _listed(given.get(key)))]
        fitting = next((union for union in unions if len(union) <= MAX_ALTERNATIVES), None)
        if fitting is None:
            return [Members(members, self._values)]
        return [Members([*members, *self._together(option)], self._values) for option in fitting]

    def _together(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """It, and what it refers to; a union in it is left alone."""
        for _ in range(MAX_DEPTH):
            self._work.spend(1)
            if not isinstance(schema, Mapping):
                return
            yield cast(Mapping[str, Any], schema)
            schema = self._resolve(cast(Mapping[str, Any], schema).get("$ref"))


class Members:
    """Schemas that hold together."""

    def __init__(self, schemas: list[Mapping[str, Any]], values: Values) -> None:
        self._schemas, self._values = schemas, values
        values.work.spend(len(schemas))

    @cached_property
    def kinds(self) -> frozenset[str]:
        found = ALL_KINDS
        for schema in self._schemas:
            names = self._types(schema.get("type"))
            if names is not None and all(name in KINDS for name in names):
                found &= frozenset[str]().union(*(KINDS[name] for name in names))
        values = self.values
        if values is None:
            return found
        self._values.work.spend(len(values))
        return found & set(map(_kind, values))

    def _types(self, named: Any) -> list[str] | None:
        if named is None:
            return None
        names: list[Any] = cast(list[Any], named) if isinstance(named, list) else [named]
        self._values.work.spend(len(names))
        return [name for name in names if isinstance(name, str)]

    @cached_property
    def values(self) -> frozenset[str] | None:
        """In JSON; None: any."""
        return self._values.allowed(self._schemas)

    @cached_property
    def required(self) -> frozenset[str]:
        lists = [_listed(schema.get("required")) for schema in self._schemas]
        self._values.work.spend(sum(map(len, lists)))
        return frozenset(name for listed in lists for name in listed if isinstance(name, str))

    def property(self, name: str) -> list[Any]:
        self._values.work.spend(len(self._schemas))
        maps = (schema["properties"] for schema in self._schemas if isinstance(schema.get("properties"), Mapping))
        return [cast(Mapping[str, Any], found)[name] for found in maps if name in found]

    def forbids(self, name: str) -> bool:
        self._values.work.spend(len(self._schemas))
        return any(
            schema.get("additionalProperties") is False
            and "patternProperties" not in schema
            and not _has(schema.get("properties"), name)
            for schema in self._schemas
        )


def _kind(text: str) -> str:
    """Of a value as text."""
    if text[0] in "-0123456789IN":
        return "integer" if text.removeprefix("-").isdecimal() else "fraction"
    return {"n": "null", "t": "boolean", "f": "boolean", '"': "string", "[": "array", "{": "object"}[text[0]]


def _has(properties: Any, name: str) -> bool:
    """Of what is no map it is not known what it has."""
    return name in cast(Mapping[str, Any], properties) if isinstance(properties, Mapping) else properties is not None


def _listed(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
