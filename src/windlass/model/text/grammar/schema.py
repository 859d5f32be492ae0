"""JSON Schemas for constrained decoding: which keywords a grammar cannot enforce, and the schema without them.

llguidance rejects these keywords; a token-by-token grammar could not enforce most of them anyway (`uniqueItems` depends on everything
written before). The rest of the schema is enforced, and the finished answer is checked against all of it (check.py).

Schemas are strangers' input: nothing here recurses with them, and what would lead a library too deep is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from windlass.foreign import shown
from windlass.model.text.grammar.compile import bad_constraint
from windlass.model.text.grammar.exclusive import Exclusion
from windlass.model.text.grammar.guard import looking
from windlass.model.text.grammar.limits import check_depth, has_inner_anchor, is_costly_multiple, is_costly_regex
from windlass.model.text.grammar.references import MAX_NAME, Place, References, Way
from windlass.model.text.grammar.room import Room

UNENFORCED = frozenset(
    """uniqueItems not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies propertyNames
    unevaluatedProperties unevaluatedItems $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor""".split()
)
HARMLESS: dict[str, Any] = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Values with which a keyword says nothing."""
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
"""Those that llguidance knows."""
COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
NUM_PROPERTIES = ("minProperties", "maxProperties")
MAX_COUNT = 2**31
"""No answer is as long, and llguidance's own limit is near."""
NOTED = UNENFORCED | COUNTS | frozenset("format pattern multipleOf $ref $schema patternProperties oneOf".split())
"""What is looked at."""
DEFINITIONS = ("$defs", "definitions")
MAPS = ("properties", "patternProperties", *DEFINITIONS)
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")
HOLDERS = frozenset((*MAPS, *LISTS, *SINGLE))
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
"""Look-around, word boundaries and back-references."""
DRAFTS = (
    *(f"http://json-schema.org/draft-{number}/schema" for number in ("04", "06", "07")),
    *(f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")),
)
_UNQUOTED = re.compile(r"[^!-~]|[\"<>\\^`{|}\[\]]")
_IN_REFERENCES = "%#/:?&=+,;@!$'()*~"
MAX_SCHEMAS = 10_000
"""Schemas within one. A grammar of as many parts is too large for llguidance."""


MAX_LEFT_OUT = 64
"""Names; beyond them, one more of every keyword."""
MAX_KEPT, MAX_KEPT_CHARACTERS = 32, 32_768


class EnforceableSchema(NamedTuple):
    schema: Any
    """What a grammar enforces. A `oneOf` is enforced as `anyOf`."""
    left_out: tuple[str, ...]
    """Keywords that it cannot, with their place: `properties.tags.uniqueItems`. Each keyword is there, not each place of it."""


def enforceable(schema: Any, room: Room | None = None) -> EnforceableSchema:
    """BadInput: no grammar can be made of it. `room`: that several schemas share."""
    with looking():
        (room or Room()).take(schema)
        return _Reduction(cast(dict[str, Any], schema)).result() if isinstance(schema, dict) else EnforceableSchema(schema, ())


def enforceable_text(text: str) -> EnforceableSchema:
    """Of JSON. A request asks twice, and requests often have the same schema."""
    return (_kept if len(text) <= MAX_KEPT_CHARACTERS else _last)(text)


@lru_cache(MAX_KEPT)
def _kept(text: str) -> EnforceableSchema:
    return enforceable(_parsed(text))


@lru_cache(1)
def _last(text: str) -> EnforceableSchema:
    """Of any size."""
    return enforceable(_parsed(text))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise bad_constraint("the JSON schema is nested too deeply; simplify it") from None
    except ValueError as error:  # a number of thousands of digits
        raise bad_constraint(f"the JSON schema cannot be read: {shown(error)}") from None


class _Reduction:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._references = root, References(root)
        self._exclusion = Exclusion(self._references.target)
        self._left_out: list[str] = []
        self._named: set[str] = set()
        """Keywords in it."""
        self._without: dict[int, frozenset[str]] = {}
        """By their id, schemas that lose keywords."""
        self._patterns: dict[int, list[str]] = {}
        """And schemas that lose some of their `patternProperties`."""

    def result(self) -> EnforceableSchema:
        unions: list[Place] = []
        for place in self._schemas():
            given = [key for key in place.schema if key in NOTED]
            if given:
                self._note(place, given)
                unions += [place] if "oneOf" in given else []
        for place in unions:
            if not self._exclusion.is_exclusive(place.schema):
                self._leave_out(place, "oneOf")
        kept = self._copied(self._root) if self._without else self._root
        return EnforceableSchema(kept, tuple(self._left_out))

    def _schemas(self) -> Iterator[Place]:
        """Every schema within the root, once: depth first, and what is referred to where it is, as llguidance does. Then definitions."""
        waiting, seen, known = [self._references.root], set[int](), {id(self._root)}
        later: list[Place] = []
        while waiting or later:
            place = waiting.pop() if waiting else later.pop()
            if id(place.schema) in seen:
                continue
            seen.add(id(place.schema))
            check_depth(place.depth)
            self._references.is_bundle |= place.document is not self._root
            yield place
            inner: list[Place] = []
            for key, found in _inner(place):
                (later if key in DEFINITIONS else inner).append(found)
                _count(known, found)
            waiting += reversed(inner)
            if "$ref" in place.schema and (referred := self._references.place(place)) is not None:
                _count(known, referred)
                waiting.append(referred)

    def _note(self, place: Place, given: list[str]) -> None:
        names = [name for name in given if self._is_lost(place.schema, name)]
        patterns = _unsupported_patterns(place.schema)
        if patterns:
            self._patterns[id(place.schema)] = patterns
        if names or patterns or not HARMLESS.keys().isdisjoint(given) or _is_otherwise(place.schema):
            self._without[id(place.schema)] = frozenset((*names, *HARMLESS))
        for name in names:
            self._leave_out(place, name)
        for pattern in patterns:
            self._leave_out(place, "patternProperties", f".{shown(pattern, MAX_NAME)}")

    def _leave_out(self, place: Place, keyword: str, more: str = "") -> None:
        if len(self._left_out) < MAX_LEFT_OUT or keyword not in self._named:
            self._named.add(keyword)
            self._left_out.append(f"{place.path}.{keyword}{more}".removeprefix("."))

    def _is_lost(self, schema: Mapping[str, Any], key: str) -> bool:
        return self._is_unenforced(key, schema[key]) or (key in NUM_PROPERTIES and not _can_count(schema))

    def _is_unenforced(self, key: str, value: Any) -> bool:
        if key in UNENFORCED:
            return key not in HARMLESS or value is not HARMLESS[key]
        if key == "format":
            return isinstance(value, str) and value not in FORMATS
        if key == "pattern":
            return isinstance(value, str) and _is_unsupported(value)
        if key == "multipleOf":
            return is_costly_multiple(value)
        if key == "$ref":
            return isinstance(value, str) and self._references.is_foreign(value)
        return key in COUNTS and isinstance(value, (int, float)) and value >= MAX_COUNT

    def _copied(self, value: Any) -> Any:
        """Recursion is no danger here: it is not nested deeply."""
        if isinstance(value, list):
            return [self._copied(item) for item in cast(list[Any], value)]
        if not isinstance(value, dict):
            return value
        given = cast(dict[str, Any], value)
        names = self._without.get(id(given))
        if names is None:
            return {key: self._copied(item) for key, item in given.items()}
        copied = {key: self._copied(item) for key, item in given.items() if key not in names}
        if quoted := _quoted(copied.get("$ref")):
            copied["$ref"] = quoted
        if "$schema" in copied:
            copied["$schema"] = standard_draft(copied["$schema"])
        lost = [copied["patternProperties"].pop(pattern) for pattern in self._patterns.get(id(given), ())]
        if lost and copied.get("additionalProperties") is False:  # what matched the patterns must have a place
            copied["additionalProperties"] = {"anyOf": lost}
        return copied


def _inner(place: Place) -> Iterator[tuple[str, Place]]:
    """Schemas directly within one, and the keyword that each belongs to."""
    for key, value in place.schema.items():
        if key in HOLDERS:
            for way, item in _held(key, value):
                if isinstance(item, dict):
                    yield key, place.within(way, cast(dict[str, Any], item))


def _held(key: str, value: Any) -> Iterator[tuple[Way, Any]]:
    if isinstance(value, dict):
        inner = cast(dict[str, Any], value)
        yield from [((key,), inner)] if key in SINGLE else (((key, name), item) for name, item in inner.items())
    elif isinstance(value, list):
        yield from (((key, number), item) for number, item in enumerate(cast(list[Any], value)))


def _count(known: set[int], place: Place) -> None:
    known.add(id(place.schema))
    if len(known) > MAX_SCHEMAS:
        raise bad_constraint(f"the JSON schema has more than {MAX_SCHEMAS:,} schemas in it; simplify it")


def _is_otherwise(schema: Mapping[str, Any]) -> bool:
    """It means the same when it is written in the way that llguidance takes."""
    return bool(_quoted(schema.get("$ref"))) or ("$schema" in schema and schema["$schema"] != standard_draft(schema["$schema"]))


def standard_draft(name: Any) -> Any:
    """The name of a draft as its authors write it, which many do not; of one that llguidance does not know, the newest."""
    if not isinstance(name, str) or name.rstrip("#") in DRAFTS:
        return name
    return next((draft for draft in DRAFTS if draft.partition("//")[2] == name.rstrip("#").partition("//")[2]), DRAFTS[-1])


def _quoted(reference: Any) -> str:
    """`#/definitions/Box<Item>`, as generators for TypeScript write it, in the way that a reference is written; empty: it is."""
    return quote(reference, safe=_IN_REFERENCES) if isinstance(reference, str) and _UNQUOTED.search(reference) else ""


def _can_count(schema: Mapping[str, Any]) -> bool:
    """llguidance counts properties only if none of those named may be missing."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return True  # nonsense, which llguidance says
    is_merged = any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf"))
    needed = {name for name in cast(list[Any], required) if isinstance(name, str)}
    return not is_merged and needed.issuperset(cast(Mapping[str, Any], properties))


def _unsupported_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Of its `patternProperties`."""
    found = schema.get("patternProperties")
    return (
        [pattern for pattern in cast(Mapping[str, Any], found) if _is_unsupported(pattern)] if isinstance(found, Mapping) else []
    )


def _is_unsupported(pattern: str) -> bool:
    return is_costly_regex(pattern) or _UNSUPPORTED_PATTERN.search(pattern) is not None or has_inner_anchor(pattern)
