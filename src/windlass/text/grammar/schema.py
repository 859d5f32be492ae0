"""JSON Schemas for constrained decoding: which keywords a grammar cannot enforce, and the schema without them.

llguidance rejects these keywords; a token-by-token grammar could not enforce most of them anyway (`uniqueItems` depends on everything
written before). The rest of the schema is enforced, and the finished answer is checked against all of it (check.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from windlass.errors import BadInput

UNENFORCED = frozenset(
    """uniqueItems not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies propertyNames
    unevaluatedProperties unevaluatedItems $dynamicRef $dynamicAnchor""".split()
)
HARMLESS: dict[str, Any] = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Values with which a keyword says nothing."""
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
"""Those that llguidance knows."""
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems")
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
"""Look-around, word boundaries and back-references."""


class EnforceableSchema(NamedTuple):
    schema: Any
    """What a grammar enforces."""
    left_out: tuple[str, ...]
    """Keywords that it cannot, with their place: `properties.tags.uniqueItems`."""


def enforceable(schema: Any) -> EnforceableSchema:
    left_out: list[str] = []
    try:
        found = _without(schema, "", left_out)
    except RecursionError:
        raise BadInput("the JSON schema is nested too deeply", field="constraint") from None
    return EnforceableSchema(found, tuple(left_out))


def _without(schema: Any, path: str, left_out: list[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in cast(Mapping[str, Any], schema).items():
        where = f"{path}.{key}" if path else key
        if _is_unenforced(key, value):
            left_out.append(where)
        elif key not in UNENFORCED:
            found[key] = _inner(key, value, where, left_out)
    return found


def _is_unenforced(key: str, value: Any) -> bool:
    if key in UNENFORCED:
        return key not in HARMLESS or value is not HARMLESS[key]
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    return key == "pattern" and isinstance(value, str) and _UNSUPPORTED_PATTERN.search(value) is not None


def _inner(key: str, value: Any, where: str, left_out: list[str]) -> Any:
    if key in MAPS and isinstance(value, Mapping):
        inner = cast(Mapping[str, Any], value)
        return {name: _without(item, f"{where}.{name}", left_out) for name, item in inner.items()}
    if isinstance(value, list):
        entries = cast(list[Any], value)
        is_schemas = key in LISTS or key == "items"
        return [_without(item, f"{where}[{place}]", left_out) for place, item in enumerate(entries)] if is_schemas else entries
    return _without(value, where, left_out) if key in SINGLE else value
